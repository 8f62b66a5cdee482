// View: a non-owning, trivially copyable window on up to three dimensions of memory of a device.
// Dimension order is slowest first: [rows, cols] or [rows, heads, dim]. Strides count elements; the last dimension is dense.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/check.h"
#include "tensor/dtype.h"

namespace cachalot {

struct View {
  void* data = nullptr;
  DType dtype = DType::f32;
  int n_dims = 2;
  std::array<int, 3> shape{0, 0, 1};
  std::array<int64_t, 3> stride{0, 1, 1};

  // A dense [rows, cols] array.
  static View matrix(void* data, DType dtype, int rows, int cols) { return {data, dtype, 2, {rows, cols, 1}, {cols, 1, 1}}; }
  // A dense [n] array, held as one row.
  static View vector(void* data, DType dtype, int n) { return matrix(data, dtype, 1, n); }

  explicit operator bool() const { return data != nullptr; }
  [[nodiscard]] int n_rows() const { return shape[0]; }
  // Elements of one row, all heads together.
  [[nodiscard]] int n_cols() const { return n_dims == 3 ? shape[1] * shape[2] : shape[1]; }
  [[nodiscard]] int64_t row_stride() const { return stride[0]; }
  [[nodiscard]] size_t row_bytes() const { return static_cast<size_t>(n_cols()) * size_of(dtype); }

  // Columns [begin, begin + n) of a matrix.
  [[nodiscard]] View cols(int begin, int n) const {
    CACHALOT_CHECK(n_dims == 2 && begin >= 0 && n >= 0 && begin + n <= shape[1], "columns {}+{} of {}", begin, n, shape[1]);
    View out = *this;
    out.data = static_cast<std::byte*>(data) + static_cast<size_t>(begin) * size_of(dtype);
    out.shape[1] = n;
    return out;
  }
  // Rows [begin, begin + n).
  [[nodiscard]] View rows(int begin, int n) const {
    CACHALOT_CHECK(begin >= 0 && n >= 0 && begin + n <= shape[0], "rows {}+{} of {}", begin, n, shape[0]);
    View out = *this;
    out.data = static_cast<std::byte*>(data) + static_cast<int64_t>(begin) * stride[0] * static_cast<int64_t>(size_of(dtype));
    out.shape[0] = n;
    return out;
  }
  // The same memory as [rows, n_heads, dim]; the columns must be n_heads * dim.
  [[nodiscard]] View heads(int n_heads, int dim) const {
    CACHALOT_CHECK(n_dims == 2 && n_heads * dim == shape[1], "{} heads of {} in {} columns", n_heads, dim, shape[1]);
    return {data, dtype, 3, {shape[0], n_heads, dim}, {stride[0], dim, 1}};
  }
  template <typename T>
  [[nodiscard]] T* row(int r) const {
    return static_cast<T*>(data) + static_cast<int64_t>(r) * stride[0];
  }
};

}  // namespace cachalot
