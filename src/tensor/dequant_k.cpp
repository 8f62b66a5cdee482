// Decoders of the K-quants: super-blocks of 256 whose sub-block scales are small integers times one f16 scale.
// In all of them a byte of `qs` holds elements that lie 32 apart, so that 32 bytes decode to consecutive runs of 32 elements.
#include "base/check.h"
#include "tensor/dequant.h"

namespace cachalot {
namespace {

// Elements that share a scale in q2_k, q3_k and q6_k. Sub-block j lies in half j / 8, run j / 2 % 4 and lanes 16 * (j % 2) onward.
constexpr int kSub = 16;
constexpr int kNumSubs = kSuperBlock / kSub;

// scales[16] (low nibble scale, high nibble minimum, per 16 elements), qs[64], d, dmin.
void q2_k(const uint8_t* block, float* out) {
  const uint8_t *scales = block, *qs = block + 16;
  const float d = load_f16(block + 80), dmin = load_f16(block + 82);
  for (int j = 0; j < kNumSubs; ++j, out += kSub) {
    const float scale = d * static_cast<float>(scales[j] & 15), minimum = dmin * static_cast<float>(scales[j] >> 4);
    const uint8_t* from = qs + 32 * (j / 8) + kSub * (j % 2);
    const int shift = 2 * (j / 2 % 4);
    for (int l = 0; l < kSub; ++l) out[l] = scale * static_cast<float>((from[l] >> shift) & 3) - minimum;
  }
}

// hmask[32], qs[64], scales[12], d. A clear mask bit subtracts 4; bit i of the mask belongs to the i-th run of 32.
void q3_k(const uint8_t* block, float* out) {
  const uint8_t *hmask = block, *qs = block + 32, *scales = block + 96;
  const float d = load_f16(block + 108);
  for (int j = 0; j < kNumSubs; ++j, out += kSub) {
    const float scale = d * static_cast<float>(q3_k_scale(scales, j));
    const uint8_t *from = qs + 32 * (j / 8) + kSub * (j % 2), *mask = hmask + kSub * (j % 2);
    const int shift = 2 * (j / 2 % 4), bit = j / 2;
    for (int l = 0; l < kSub; ++l) {
      const int q = ((from[l] >> shift) & 3) - (((mask[l] >> bit) & 1) != 0 ? 0 : 4);
      out[l] = scale * static_cast<float>(q);
    }
  }
}

// d, dmin, scales[12], then qh[32] in Q5_K only, then qs[128]. Value = (d * scale) * q - (dmin * minimum).
void q4_k_or_q5_k(const uint8_t* block, bool five_bits, float* out) {
  const float d = load_f16(block), dmin = load_f16(block + 2);
  const uint8_t *scales = block + 4, *qh = block + 16, *qs = block + (five_bits ? 48 : 16);
  for (int j = 0; j < kSuperBlock / 32; ++j, out += 32) {
    const ScaleMin s = k_scale_min(scales, j);
    const float scale = d * static_cast<float>(s.scale), minimum = dmin * static_cast<float>(s.minimum);
    const uint8_t* from = qs + 32 * (j / 2);
    const int shift = 4 * (j % 2);
    for (int l = 0; l < 32; ++l) {
      int q = (from[l] >> shift) & 15;
      if (five_bits) q |= ((qh[l] >> j) & 1) << 4;
      out[l] = scale * static_cast<float>(q) - minimum;
    }
  }
}

// ql[128], qh[64], i8 scales[16], d. Value = (d * scale) * (q - 32).
void q6_k(const uint8_t* block, float* out) {
  const uint8_t *ql = block, *qh = block + 128, *scales = block + 192;
  const float d = load_f16(block + 208);
  for (int j = 0; j < kNumSubs; ++j, out += kSub) {
    const float scale = d * static_cast<float>(static_cast<int8_t>(scales[j]));
    const int half = j / 8, run = j / 2 % 4, lane = kSub * (j % 2);
    const uint8_t *low = ql + 64 * half + 32 * (run % 2) + lane, *high = qh + 32 * half + lane;
    for (int l = 0; l < kSub; ++l) {
      const int q = ((low[l] >> (4 * (run / 2))) & 15) | (((high[l] >> (2 * run)) & 3) << 4);
      out[l] = scale * static_cast<float>(q - 32);
    }
  }
}

}  // namespace

void dequant_k(Format format, const uint8_t* data, int64_t n, float* out) {
  const int bytes = info(format).block_bytes;
  for (int64_t i = 0; i < n; i += kSuperBlock, data += bytes, out += kSuperBlock) {
    switch (format) {
      case Format::q2_k: q2_k(data, out); break;
      case Format::q3_k: q3_k(data, out); break;
      case Format::q4_k: q4_k_or_q5_k(data, false, out); break;
      case Format::q5_k: q4_k_or_q5_k(data, true, out); break;
      case Format::q6_k: q6_k(data, out); break;
      default: CACHALOT_CHECK(false, "{}", info(format).name);
    }
  }
}

}  // namespace cachalot
