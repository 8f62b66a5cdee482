// Random weight matrices in every storage format.
#pragma once

#include <string>

#include "tensor/linear_source.h"

namespace cachalot::test {

struct WeightShape {
  Format format = Format::f32;
  int out = 0, in = 0;
  int n_matrices = 1;
  int group = 0;          // planar formats; 0 takes the largest of 128, 64, 32 .. that divides `in`
  bool permuted = false;  // planar formats: with an act-order permutation
  bool with_bias = false;
};

// Random valid blocks whose values have a size of about 1 / sqrt(in), so that products with normal inputs are of size 1. Equal seeds
// give equal bytes.
LinearSource random_source(const WeightShape& shape, uint64_t seed, std::string name = "random");

// `in` rounded up to whole blocks of the format.
int rounded_to_blocks(Format format, int in);

}  // namespace cachalot::test
