// KvCodec: rows of the KV cache as numbers and back. Every backend's rows must decode to what this decodes them to, and hold the bytes that
// this writes for the same numbers.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <span>

#include "base/check.h"
#include "base/float_formats.h"
#include "ops/kv_layout.h"

namespace cachalot {

// The scale of a group whose largest magnitude is `largest`. Not below the smallest normal number, so that a group of zeros needs no case.
inline float kv_group_scale(float largest) { return std::max(largest / 448.0f, FLT_MIN); }

// One row of K. values: heads * k_dim; row: layout.k_row_bytes() bytes.
inline void encode_kv_row(const KvLayout& layout, std::span<const float> values, std::byte* row) {
  const auto each = [&](auto convert, std::byte* to, std::span<const float> from) {
    for (const float v : from) {
      const auto stored = convert(v);
      std::memcpy(to, &stored, sizeof(stored));
      to += sizeof(stored);
    }
  };
  switch (layout.format) {
    case KvFormat::f32: return each([](float v) { return v; }, row, values);
    case KvFormat::f16: return each(f32_to_f16, row, values);
    case KvFormat::bf16: return each(f32_to_bf16, row, values);
    case KvFormat::fp8: break;
  }
  CACHALOT_CHECK(layout.v_is_k_prefix && layout.heads == 1 && fp8_row_fits(layout.v_dim, layout.k_dim - layout.v_dim));
  const auto rank = static_cast<size_t>(layout.v_dim);
  std::byte* scales = row + rank;
  for (size_t begin = 0; begin < rank; begin += kKvScaleGroup, scales += sizeof(float)) {
    const auto group = values.subspan(begin, std::min<size_t>(kKvScaleGroup, rank - begin));
    float largest = 0.0f;
    for (const float v : group) largest = std::fmax(largest, std::fabs(v));
    const float scale = kv_group_scale(largest);
    std::memcpy(scales, &scale, sizeof(scale));
    each([&](float v) { return f32_to_e4m3(v / scale); }, row + begin, group);
  }
  each(f32_to_bf16, scales, values.subspan(rank));
}

inline void decode_kv_row(const KvLayout& layout, const std::byte* row, std::span<float> values) {
  const auto half = [](const std::byte* from) {
    uint16_t bits = 0;
    std::memcpy(&bits, from, sizeof(bits));
    return bits;
  };
  switch (layout.format) {
    case KvFormat::f32: std::memcpy(values.data(), row, values.size_bytes()); return;
    case KvFormat::f16:
      for (size_t i = 0; i < values.size(); ++i) values[i] = f16_to_f32(half(row + 2 * i));
      return;
    case KvFormat::bf16:
      for (size_t i = 0; i < values.size(); ++i) values[i] = bf16_to_f32(half(row + 2 * i));
      return;
    case KvFormat::fp8: break;
  }
  const auto rank = static_cast<size_t>(layout.v_dim);
  const std::byte* tail = row + rank + 4 * ((rank + kKvScaleGroup - 1) / kKvScaleGroup);
  for (size_t i = 0; i < rank; ++i) {
    float scale = 0.0f;
    std::memcpy(&scale, row + rank + 4 * (i / kKvScaleGroup), sizeof(scale));
    values[i] = e4m3_to_f32(static_cast<uint8_t>(row[i])) * scale;
  }
  for (size_t i = rank; i < values.size(); ++i) values[i] = bf16_to_f32(half(tail + 2 * (i - rank)));
}

}  // namespace cachalot
