// Where the sums of the wide layout's products go, over the vectors of simd_avx512.h or simd_avx2.h.
#pragma once

#include "cpu/isa/kernels.h"

namespace cachalot::cpu {
namespace {

// Rows [row, row + kWidth) of token t.
inline void finish_wide(const WideProduct& p, int row, int n_rows, int t, F sum) {
  float* const y = p.y[t] + p.y_col + row;
  const int n = n_rows - row < kWidth ? n_rows - row : kWidth;
  if (n == kWidth && p.bias == nullptr && p.beta == 0.0f) {
    store(y, sum);
    return;
  }
  float values[kWidth];
  store(values, sum);
  for (int r = 0; r < n; ++r) {
    float value = values[r];
    if (p.bias != nullptr) value += p.bias[row + r];
    if (p.beta != 0.0f) value += p.beta * y[r];
    y[r] = value;
  }
}

}  // namespace
}  // namespace cachalot::cpu
