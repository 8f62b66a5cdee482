// What the files of RefOps share: its packed form, and checked access to the memory behind a View. Private to src/ops.
#pragma once

#include <span>
#include <vector>

#include "ops/ops.h"

namespace cachalot::ref {

class RefPacked final : public Packed {
 public:
  int out = 0, in = 0, n_matrices = 0;
  std::vector<float> weights;  // [n_matrices, out, in]
  std::vector<float> bias;     // [out], or empty
  [[nodiscard]] size_t bytes() const override { return (weights.size() + bias.size()) * sizeof(float); }
  // Row `r` of matrix `m`: [in].
  [[nodiscard]] const float* row(int m, int r) const {
    return weights.data() + (static_cast<size_t>(m) * static_cast<size_t>(out) + static_cast<size_t>(r)) * static_cast<size_t>(in);
  }
};

inline const RefPacked& packed_of(const Linear& w) {
  const auto* packed = dynamic_cast<const RefPacked*>(w.packed.get());
  CACHALOT_CHECK(packed != nullptr, "a Linear that RefOps did not pack");
  CACHALOT_CHECK(w.out == packed->out && w.in == packed->in && w.first >= 0 && w.first + w.n_matrices <= packed->n_matrices);
  return *packed;
}

// Sum in double, in eight interleaved parts so that the compiler can use vectors without reordering anything.
inline double dot(const float* a, const float* b, int n) {
  double parts[8] = {};
  int i = 0;
  for (; i + 8 <= n; i += 8)
    for (int j = 0; j < 8; ++j) parts[j] += static_cast<double>(a[i + j]) * static_cast<double>(b[i + j]);
  for (; i < n; ++i) parts[0] += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return ((parts[0] + parts[4]) + (parts[2] + parts[6])) + ((parts[1] + parts[5]) + (parts[3] + parts[7]));
}

// The values of a dense index array, held as one row or as one column.
inline std::span<const int> ints(const View& view) {
  CACHALOT_CHECK(view.dtype == DType::i32, "{} instead of i32", name_of(view.dtype));
  CACHALOT_CHECK(view.n_rows() <= 1 || view.row_stride() == view.n_cols(), "an index array must be dense");
  return {static_cast<const int*>(view.data), static_cast<size_t>(view.n_rows()) * static_cast<size_t>(view.n_cols())};
}
// Likewise of a dense f32 vector.
inline std::span<const float> floats(const View& view) {
  CACHALOT_CHECK(view.dtype == DType::f32, "{} instead of f32", name_of(view.dtype));
  CACHALOT_CHECK(view.n_rows() <= 1 || view.row_stride() == view.n_cols(), "a vector must be dense");
  return {static_cast<const float*>(view.data), static_cast<size_t>(view.n_rows()) * static_cast<size_t>(view.n_cols())};
}
// Row `r` of an f32 view whose heads, if any, lie one after the other.
inline float* row_of(const View& view, int r) {
  CACHALOT_CHECK(view.dtype == DType::f32, "{} instead of f32", name_of(view.dtype));
  CACHALOT_CHECK(view.n_dims == 2 || view.stride[1] == view.shape[2], "heads with gaps between them");
  return view.row<float>(r);
}

// silu(G x) * (U x) of matrix `m`, whose first half of rows is G. x [in], h [out / 2].
void swiglu_row(const RefPacked& w, int m, const float* x, float* h);

}  // namespace cachalot::ref
