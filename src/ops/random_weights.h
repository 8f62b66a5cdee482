// Random weight matrices in every storage format.
#pragma once

#include <string>
#include <vector>

#include "tensor/linear_source.h"

namespace cachalot::test {

struct WeightShape {
  Format format = Format::f32;
  int out = 0, in = 0;
  int n_matrices = 1;
  int group = 0;          // planar formats; 0 takes the largest of 128, 64, 32 .. that divides `in`
  bool permuted = false;  // planar formats: with an act-order permutation
  bool with_bias = false;
  bool operator==(const WeightShape&) const = default;
};

// Random valid blocks whose values have a size of about 1 / sqrt(in), so that products with normal inputs are of size 1. Equal seeds
// give equal bytes.
LinearSource random_source(const WeightShape& shape, uint64_t seed, std::string name = "random");

// While one is there, weights of equal shape and seed are made once on its thread: random numbers are most of what a case costs, which is
// prepared for several backends.
class SharedSources {
 public:
  SharedSources();
  ~SharedSources();
  SharedSources(const SharedSources&) = delete;
  SharedSources& operator=(const SharedSources&) = delete;

  // As random_source().
  static LinearSource get(const WeightShape& shape, uint64_t seed, std::string name);

 private:
  struct Entry {
    WeightShape shape;
    uint64_t seed;
    LinearSource source;  // copies share its bytes
  };
  std::vector<Entry> entries_;
  SharedSources* outer_;
};

// `in` rounded up to whole blocks of the format.
int rounded_to_blocks(Format format, int in);

}  // namespace cachalot::test
