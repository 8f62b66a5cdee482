// AWQ (Lin et al. 2024): input channels that carry much are scaled up before rounding and their inputs down by the same factor, which is
// folded into whatever makes the inputs: a norm's weight, or the rows of the matrix before. The factor is searched by the error that it
// leaves on calibration inputs, in f32; candidates that are not finite are passed over.
#pragma once

#include <span>
#include <vector>

#include "quant/matrix_quantizer.h"
#include "quant/moments.h"

namespace cachalot {

// A matrix [out, in] that will be multiplied by the scaled channels.
struct AwqMatrix {
  std::span<const float> values;
  int out = 0;
  Scheme scheme;
  double weight = 1.0;  // of its error beside the others'
};

struct AwqScale {
  std::vector<float> scale;                      // [in]; all 1 when nothing is better
  double error_without = 0.0, error_with = 0.0;  // relative output error
};
// One factor for all `matrices`, which share the inputs of `moments` (with Gram matrix). A channel that is always zero keeps 1.
AwqScale search_awq_scale(Ops& ops, ThreadPool& pool, const Moments& moments, std::span<const AwqMatrix> matrices, RangeSearch search);

// trace(D G D^T) for D = difference [rows, n]: the squared error of the outputs over the calibration tokens.
double output_error(Ops& ops, const Moments& moments, std::span<const float> difference, int rows);

}  // namespace cachalot
