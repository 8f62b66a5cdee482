// Decoders whose 4-bit codes index a table of values: IQ4_NL, IQ4_XS and MXFP4.
#include "base/check.h"
#include "tensor/dequant.h"

namespace cachalot {
namespace {

// FP4 E2M1 levels. Code 8 is +0 here, as in the reference's integer table; the sign of a zero weight has no effect.
constexpr float kFp4Levels[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, 0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// 16 bytes to 32 values: element j is the low nibble of byte j, element j + 16 its high nibble.
template <typename Level>
void look_up(const uint8_t* qs, const Level (&levels)[16], float scale, float* out) {
  for (int j = 0; j < kBlock / 2; ++j) {
    out[j] = scale * static_cast<float>(levels[qs[j] & 15]);
    out[j + kBlock / 2] = scale * static_cast<float>(levels[qs[j] >> 4]);
  }
}

// d, scales_h u16, scales_l[4], qs[128].
void iq4_xs(const uint8_t* block, float* out) {
  const float d = load_f16(block);
  for (int s = 0; s < kSuperBlock / kBlock; ++s)
    look_up(block + 8 + 16 * s, kIq4Levels, d * static_cast<float>(iq4_xs_scale(block, s)), out + kBlock * s);
}

}  // namespace

void dequant_table(Format format, const uint8_t* data, int64_t n, float* out) {
  const FormatInfo& entry = info(format);
  for (int64_t i = 0; i < n; i += entry.block_elems, data += entry.block_bytes, out += entry.block_elems) {
    switch (format) {
      case Format::iq4_nl: look_up(data + 2, kIq4Levels, load_f16(data), out); break;
      case Format::iq4_xs: iq4_xs(data, out); break;
      case Format::mxfp4: look_up(data + 1, kFp4Levels, e8m0_to_f32(data[0]), out); break;
      default: CACHALOT_CHECK(false, "{}", entry.name);
    }
  }
}

}  // namespace cachalot
