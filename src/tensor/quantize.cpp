// Encoders: the plain floats, the 32-element blocks by their reference rules, and DeepSeek's FP8 blocks. The others are in quantize_k.cpp.
#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "tensor/block_codes.h"
#include "tensor/dequant.h"

namespace cachalot {
namespace {

// Truncates toward zero into [low, high], which holds 0. A cast may not see huge values or NaN: they become the nearest end and 0.
int truncate_to(float value, int low, int high) {
  if (std::isnan(value)) return 0;
  if (value <= static_cast<float>(low)) return low;
  if (value >= static_cast<float>(high)) return high;
  return static_cast<int>(value);
}

void pack_nibbles(const int (&q)[kBlock], uint8_t* qs) {
  for (int j = 0; j < kBlock / 2; ++j) qs[j] = static_cast<uint8_t>((q[j] & 15) | ((q[j + kBlock / 2] & 15) << 4));
}

uint32_t fifth_bits(const int (&q)[kBlock]) {
  uint32_t bits = 0;
  for (int e = 0; e < kBlock; ++e) bits |= static_cast<uint32_t>(q[e] >> 4 & 1) << e;
  return bits;
}

// The codes divide by the f32 scale, not by the rounded one that is stored; the reference does so too.
float inverse(float d) { return d != 0.0f ? 1.0f / d : 0.0f; }

// q4_0 and q5_0: the value of the largest magnitude (the first of equals) becomes the lowest code, so that its sign gets the extra level.
void symmetric(const float* in, int bits, uint8_t* block) {
  const int n_levels = 1 << bits;
  float amax = 0.0f, extreme = 0.0f;
  for (int e = 0; e < kBlock; ++e) {
    if (std::fabs(in[e]) > amax) {
      amax = std::fabs(in[e]);
      extreme = in[e];
    }
  }
  const float d = extreme / static_cast<float>(-n_levels / 2), id = inverse(d);
  int q[kBlock];
  for (int e = 0; e < kBlock; ++e) q[e] = truncate_to(in[e] * id + (static_cast<float>(n_levels / 2) + 0.5f), 0, n_levels - 1);
  store(block, f32_to_f16(d));
  if (bits == 5) store(block + 2, fifth_bits(q));
  pack_nibbles(q, block + (bits == 5 ? 6 : 2));
}

// q4_1 and q5_1: codes 0 .. 2^bits - 1 span [min, max].
void affine(const float* in, int bits, uint8_t* block) {
  const int top = (1 << bits) - 1;
  const auto [low, high] = std::minmax_element(in, in + kBlock);
  const float minimum = *low, d = (*high - minimum) / static_cast<float>(top), id = inverse(d);
  int q[kBlock];
  for (int e = 0; e < kBlock; ++e) q[e] = truncate_to((in[e] - minimum) * id + 0.5f, 0, top);
  store(block, f32_to_f16(d));
  store(block + 2, f32_to_f16(minimum));
  if (bits == 5) store(block + 4, fifth_bits(q));
  pack_nibbles(q, block + (bits == 5 ? 8 : 4));
}

void q8_0(const float* in, uint8_t* block) {
  float amax = 0.0f;
  for (int e = 0; e < kBlock; ++e) amax = std::max(amax, std::fabs(in[e]));
  const float d = amax / 127.0f, id = inverse(d);
  store(block, f32_to_f16(d));
  for (int e = 0; e < kBlock; ++e) block[2 + e] = static_cast<uint8_t>(truncate_to(std::round(in[e] * id), -127, 127));
}

// Formats with one simple rule that every writer follows when there is no importance.
bool has_reference_rule(Format format) { return format >= Format::q4_0 && format <= Format::q8_0; }

}  // namespace

bool can_quantize(Format format) {
  return format == Format::f32 || format == Format::f16 || format == Format::bf16 || has_block_codes(format);
}

void quantize_row(Format format, const float* in, std::span<const float> importance, std::byte* out) {
  const auto n = static_cast<int64_t>(importance.size());
  if (!has_block_codes(format)) return quantize_row(format, in, n, out);
  CACHALOT_CHECK(n % info(format).block_elems == 0, "{} elements in blocks of {}", n, info(format).block_elems);
  quantize_weighted(format, in, importance.data(), n, reinterpret_cast<uint8_t*>(out));
}

void quantize_row(Format format, const float* in, int64_t n, std::byte* out) {
  const FormatInfo& entry = info(format);
  CACHALOT_CHECK(can_quantize(format), "{} cannot be written", entry.name);
  CACHALOT_CHECK(n >= 0 && n % entry.block_elems == 0, "{} elements in blocks of {}", n, entry.block_elems);
  auto* block = reinterpret_cast<uint8_t*>(out);
  if (has_block_codes(format) && !has_reference_rule(format)) return quantize_weighted(format, in, nullptr, n, block);
  for (int64_t i = 0; i < n; i += entry.block_elems, in += entry.block_elems, block += entry.block_bytes) {
    switch (format) {
      case Format::f32: store(block, *in); break;
      case Format::f16: store(block, f32_to_f16(*in)); break;
      case Format::bf16: store(block, f32_to_bf16(*in)); break;
      case Format::q4_0: symmetric(in, 4, block); break;
      case Format::q4_1: affine(in, 4, block); break;
      case Format::q5_0: symmetric(in, 5, block); break;
      case Format::q5_1: affine(in, 5, block); break;
      default: q8_0(in, block); break;
    }
  }
}

void quantize_fp8_block(const float* in, int out_rows, int in_cols, std::byte* codes, float* scales) {
  for (int row0 = 0; row0 < out_rows; row0 += kFp8Block) {
    for (int col0 = 0; col0 < in_cols; col0 += kFp8Block) {
      const int row1 = std::min(row0 + kFp8Block, out_rows), col1 = std::min(col0 + kFp8Block, in_cols);
      const auto at = [&](int row, int col) { return static_cast<size_t>(row) * static_cast<size_t>(in_cols) + static_cast<size_t>(col); };
      float amax = 0.0f;
      for (int row = row0; row < row1; ++row)
        for (int col = col0; col < col1; ++col) amax = std::max(amax, std::fabs(in[at(row, col)]));
      const float scale = amax / 448.0f;
      for (int row = row0; row < row1; ++row)
        for (int col = col0; col < col1; ++col)
          codes[at(row, col)] = std::byte{scale == 0.0f ? uint8_t{0} : f32_to_e4m3(in[at(row, col)] / scale)};
      *scales++ = scale;
    }
  }
}

}  // namespace cachalot
