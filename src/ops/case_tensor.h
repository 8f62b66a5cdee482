// CaseTensor: an array on a device for one test case, with guard bytes on all sides (between rows too), so that a write outside its
// rows is noticed, and NaN in every element that nobody has set, so that a read of unset memory is noticed as well.
#pragma once

#include <span>
#include <vector>

#include "ops/ops.h"

namespace cachalot::test {

class CaseTensor {
 public:
  // Rows lie cols + gap elements apart.
  CaseTensor(Ops& ops, DType dtype, int rows, int cols, int gap = 0);

  // Sets all elements; floats are rounded to the dtype. rows * cols values.
  void set(std::span<const float> values);
  void set(std::span<const int> values);
  void set(std::span<const std::byte> bytes);  // of u8

  [[nodiscard]] const View& view() const { return view_; }
  [[nodiscard]] std::vector<float> values() const;  // read back from the device
  [[nodiscard]] bool guards_intact() const;

 private:
  std::vector<std::byte> download() const;
  size_t offset(int row, int col) const;

  Ops& ops_;
  Buffer buffer_;
  View view_;
  size_t bytes_;
};

// `value` rounded to f32, f16 or bf16.
float rounded(float value, DType dtype);

}  // namespace cachalot::test
