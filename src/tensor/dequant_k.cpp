// Decoders of the K-quants: super-blocks of 256 whose sub-block scales are small integers times one f16 scale.
// In all of them a byte of `qs` holds elements that lie 32 apart, so that 32 bytes decode to consecutive runs of 32 elements.
#include "base/check.h"
#include "tensor/dequant.h"

namespace cachalot {
namespace {

// scales[16] (low nibble scale, high nibble minimum, per 16 elements), qs[64], d, dmin.
void q2_k(const uint8_t* block, float* out) {
  const uint8_t *scales = block, *qs = block + 16;
  const float d = load_f16(block + 80), dmin = load_f16(block + 82);
  for (int e = 0; e < kSuperBlock; ++e) {
    const int half = e / 128, run = e % 128 / 32, lane = e % 32;
    const float scale = d * static_cast<float>(scales[e / 16] & 15), minimum = dmin * static_cast<float>(scales[e / 16] >> 4);
    const int q = (qs[32 * half + lane] >> (2 * run)) & 3;
    out[e] = scale * static_cast<float>(q) - minimum;
  }
}

// Scale j (0..15) of Q3_K: 4 low bits in the nibbles of bytes 0..7, 2 high bits in bytes 8..11; stored with 32 added.
int q3_k_scale(const uint8_t* scales, int j) {
  const int low = j < 8 ? scales[j] & 15 : scales[j - 8] >> 4;
  const int high = (scales[8 + j % 4] >> (2 * (j / 4))) & 3;
  return (low | (high << 4)) - 32;
}

// hmask[32], qs[64], scales[12], d. A clear mask bit subtracts 4.
void q3_k(const uint8_t* block, float* out) {
  const uint8_t *hmask = block, *qs = block + 32, *scales = block + 96;
  const float d = load_f16(block + 108);
  for (int e = 0; e < kSuperBlock; ++e) {
    const int half = e / 128, run = e % 128 / 32, lane = e % 32;
    const float scale = d * static_cast<float>(q3_k_scale(scales, e / 16));
    const int low = (qs[32 * half + lane] >> (2 * run)) & 3;
    const int q = low - ((hmask[lane] >> (e / 32)) & 1 ? 0 : 4);
    out[e] = scale * static_cast<float>(q);
  }
}

struct ScaleMin {
  int scale, minimum;  // 0..63
};

// Scale and minimum of sub-block j (0..7) of Q4_K and Q5_K. The first four have 6 bits in one byte each; the last four keep their
// low 4 bits in bytes 8..11 and their high 2 bits in the spare bits of the first eight bytes.
ScaleMin k_scale_min(const uint8_t* b, int j) {
  if (j < 4) return {b[j] & 63, b[j + 4] & 63};
  return {(b[j + 4] & 15) | ((b[j - 4] >> 6) << 4), (b[j + 4] >> 4) | ((b[j] >> 6) << 4)};
}

// d, dmin, scales[12], then qh[32] in Q5_K only, then qs[128]. Value = (d * scale) * q - (dmin * minimum).
void q4_k_or_q5_k(const uint8_t* block, bool five_bits, float* out) {
  const float d = load_f16(block), dmin = load_f16(block + 2);
  const uint8_t *scales = block + 4, *qh = block + 16, *qs = block + (five_bits ? 48 : 16);
  for (int e = 0; e < kSuperBlock; ++e) {
    const int sub_block = e / 32, lane = e % 32;
    const ScaleMin s = k_scale_min(scales, sub_block);
    const uint8_t pair = qs[32 * (sub_block / 2) + lane];
    int q = sub_block % 2 == 0 ? pair & 15 : pair >> 4;
    if (five_bits) q |= ((qh[lane] >> sub_block) & 1) << 4;
    const float scale = d * static_cast<float>(s.scale), minimum = dmin * static_cast<float>(s.minimum);
    out[e] = scale * static_cast<float>(q) - minimum;
  }
}

// ql[128], qh[64], i8 scales[16], d. Value = (d * scale) * (q - 32).
void q6_k(const uint8_t* block, float* out) {
  const uint8_t *ql = block, *qh = block + 128, *scales = block + 192;
  const float d = load_f16(block + 208);
  for (int e = 0; e < kSuperBlock; ++e) {
    const int half = e / 128, run = e % 128 / 32, lane = e % 32;
    const uint8_t pair = ql[64 * half + 32 * (run % 2) + lane];
    const int low = run < 2 ? pair & 15 : pair >> 4;
    const int high = (qh[32 * half + lane] >> (2 * run)) & 3;
    const float scale = d * static_cast<float>(static_cast<int8_t>(scales[e / 16]));
    out[e] = scale * static_cast<float>((low | (high << 4)) - 32);
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
