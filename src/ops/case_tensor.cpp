// Guarded arrays: see case_tensor.h.
#include "ops/case_tensor.h"

#include <algorithm>
#include <cstring>

#include "base/float_formats.h"

namespace cachalot::test {
namespace {

constexpr size_t kGuard = 256;
constexpr std::byte kGuardByte{0xA5};
constexpr std::byte kUnset{0xFF};  // all bits set is a NaN in every float format

void store(std::byte* to, DType dtype, float value) {
  uint16_t half = 0;
  switch (dtype) {
    case DType::f32: std::memcpy(to, &value, 4); return;
    case DType::f16: half = f32_to_f16(value); break;
    case DType::bf16: half = f32_to_bf16(value); break;
    default: CACHALOT_CHECK(false, "floats in {}", name_of(dtype));
  }
  std::memcpy(to, &half, 2);
}

float load(const std::byte* from, DType dtype) {
  uint16_t half = 0;
  std::memcpy(&half, from, std::min<size_t>(2, size_of(dtype)));
  float value = 0.0f;
  int whole = 0;
  switch (dtype) {
    case DType::f32: std::memcpy(&value, from, 4); return value;
    case DType::i32: std::memcpy(&whole, from, 4); return static_cast<float>(whole);
    case DType::f16: return f16_to_f32(half);
    case DType::bf16: return bf16_to_f32(half);
    case DType::u8: return static_cast<float>(from[0]);
  }
  return value;
}

}  // namespace

float rounded(float value, DType dtype) {
  std::byte bytes[4];
  store(bytes, dtype, value);
  return load(bytes, dtype);
}

CaseTensor::CaseTensor(Ops& ops, DType dtype, int rows, int cols, int gap) : ops_(ops) {
  const size_t stride = static_cast<size_t>(cols) + static_cast<size_t>(gap);
  bytes_ = 2 * kGuard + static_cast<size_t>(rows) * stride * size_of(dtype);
  buffer_ = ops.alloc(bytes_);
  view_ = View::matrix(static_cast<std::byte*>(buffer_.get()) + kGuard, dtype, rows, cols);
  view_.stride[0] = static_cast<int64_t>(stride);
  std::vector<std::byte> host(bytes_, kGuardByte);
  for (int r = 0; r < rows; ++r) std::fill_n(host.begin() + static_cast<std::ptrdiff_t>(offset(r, 0)), view_.row_bytes(), kUnset);
  ops.upload(buffer_.get(), host.data(), bytes_);
}

size_t CaseTensor::offset(int row, int col) const {
  return kGuard + (static_cast<size_t>(row) * static_cast<size_t>(view_.stride[0]) + static_cast<size_t>(col)) * size_of(view_.dtype);
}

std::vector<std::byte> CaseTensor::download() const {
  std::vector<std::byte> host(bytes_);
  ops_.download(host.data(), buffer_.get(), bytes_);
  return host;
}

void CaseTensor::set(std::span<const float> values) {
  const int rows = view_.n_rows(), cols = view_.n_cols();
  CACHALOT_CHECK(values.size() == static_cast<size_t>(rows) * static_cast<size_t>(cols), "{} values for {} x {}", values.size(), rows,
                 cols);
  auto host = download();
  size_t i = 0;
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < cols; ++c) store(&host[offset(r, c)], view_.dtype, values[i++]);
  ops_.upload(buffer_.get(), host.data(), bytes_);
}

void CaseTensor::set(std::span<const int> values) {
  const int rows = view_.n_rows(), cols = view_.n_cols();
  CACHALOT_CHECK(view_.dtype == DType::i32 && values.size() == static_cast<size_t>(rows) * static_cast<size_t>(cols));
  auto host = download();
  for (int r = 0; r < rows; ++r)
    std::memcpy(&host[offset(r, 0)], values.data() + static_cast<size_t>(r) * static_cast<size_t>(cols), view_.row_bytes());
  ops_.upload(buffer_.get(), host.data(), bytes_);
}

void CaseTensor::set(std::span<const std::byte> bytes) {
  CACHALOT_CHECK(view_.dtype == DType::u8 && view_.stride[0] == view_.n_cols() && bytes.size() == bytes_ - 2 * kGuard);
  ops_.upload(view_.data, bytes.data(), bytes.size());
}

std::vector<float> CaseTensor::values() const {
  const auto host = download();
  std::vector<float> out;
  out.reserve(static_cast<size_t>(view_.n_rows()) * static_cast<size_t>(view_.n_cols()));
  for (int r = 0; r < view_.n_rows(); ++r)
    for (int c = 0; c < view_.n_cols(); ++c) out.push_back(load(&host[offset(r, c)], view_.dtype));
  return out;
}

bool CaseTensor::guards_intact() const {
  const auto host = download();
  size_t at = 0;
  const auto intact_to = [&](size_t end) {
    for (; at < end; ++at)
      if (host[at] != kGuardByte) return false;
    return true;
  };
  for (int r = 0; r < view_.n_rows(); ++r) {
    if (!intact_to(offset(r, 0))) return false;
    at += view_.row_bytes();
  }
  return intact_to(host.size());
}

}  // namespace cachalot::test
