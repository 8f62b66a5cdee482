// Encoders that weigh errors: K-quants, IQ4, and the 32-element blocks when there is importance. Each run is fitted alone (run_fit.h); in
// super-blocks its scale and minimum then become small integers, chosen among the neighbours of the rounded ones by the error that they
// leave; codes follow from the values that are stored.
#include <array>

#include "base/check.h"
#include "tensor/block_codes.h"
#include "tensor/run_fit.h"

namespace cachalot {
namespace {

float stored_f16(uint8_t* to, float value) {
  const uint16_t half = f32_to_f16(value);
  store(to, half);
  return f16_to_f32(half);
}

// Codes of a block from the scales that it holds by now.
template <int N>
void assign_codes(Format format, const float* x, int n_elems, uint8_t* block) {
  const CodeInfo codes = code_info(format);
  float scale[kMaxRuns], offset[kMaxRuns];
  uint8_t q[kSuperBlock];
  read_block_grid(format, reinterpret_cast<const std::byte*>(block), scale, offset);
  for (int r = 0; r < n_elems / N; ++r, x += N) {
    if (codes.levels == nullptr) {
      // A signed scale may be negative, and a zero one has its codes at the offset.
      const float inverse = scale[r] != 0.0f ? 1.0f / scale[r] : 0.0f, top = static_cast<float>(codes.n_codes - 1);
      const float zero = scale[r] != 0.0f ? 0.0f : format == Format::q3_k ? 4.0f : format == Format::q6_k ? 32.0f : 0.0f;
      for (int j = 0; j < N; ++j) {
        const float v = std::min(std::max((x[j] - offset[r]) * inverse + zero, 0.0f), top);
        q[r * N + j] = static_cast<uint8_t>(round_even(std::isnan(v) ? 0.0f : v));
      }
    } else {
      const float inverse = scale[r] != 0.0f ? 1.0f / scale[r] : 0.0f;
      for (int j = 0; j < N; ++j) {
        int code = 0;
        for (int i = 1; i < codes.n_codes; ++i) code += x[j] * inverse > 0.5f * (codes.levels[i - 1] + codes.levels[i]) ? 1 : 0;
        q[r * N + j] = static_cast<uint8_t>(code);
      }
    }
  }
  write_block_codes(format, q, reinterpret_cast<std::byte*>(block));
}

// ---- scale and minimum per run: q2_k, q4_k, q5_k ----

template <int N, int kRuns>
struct AffineBlock {
  float d = 0.0f, dmin = 0.0f;
  int scale[kRuns] = {}, minimum[kRuns] = {};
};

// Integers 0 .. top for scales and minima on the f16 units d and dmin.
template <int N, int kRuns>
AffineBlock<N, kRuns> fit_affine_block(const float* x, const float* w, int n_codes, int top, uint8_t* d_at, uint8_t* dmin_at) {
  std::array<AffineFit, kRuns> fits;
  float largest_scale = 0.0f, largest_minimum = 0.0f;
  for (int r = 0; r < kRuns; ++r) {
    fits[static_cast<size_t>(r)] = fit_affine<N>(x + r * N, w + r * N, n_codes, true);
    largest_scale = std::max(largest_scale, fits[static_cast<size_t>(r)].scale);
    largest_minimum = std::max(largest_minimum, -fits[static_cast<size_t>(r)].offset);
  }
  AffineBlock<N, kRuns> out;
  out.d = stored_f16(d_at, largest_scale / static_cast<float>(top));
  out.dmin = stored_f16(dmin_at, largest_minimum / static_cast<float>(top));
  const auto nearest = [&](float value, float unit) {
    return unit > 0.0f ? std::clamp(static_cast<int>(std::lround(value / unit)), 0, top) : 0;
  };
  for (int r = 0; r < kRuns; ++r) {
    const AffineFit& fit = fits[static_cast<size_t>(r)];
    const int s0 = nearest(fit.scale, out.d), m0 = nearest(-fit.offset, out.dmin);
    float best = -1.0f;
    for (int s = std::max(s0 - 1, 0); s <= std::min(s0 + 1, top); ++s)
      for (int m = std::max(m0 - 1, 0); m <= std::min(m0 + 1, top); ++m) {
        const float error = affine_error<N>(x + r * N, w + r * N, out.d * static_cast<float>(s), -out.dmin * static_cast<float>(m),
                                            static_cast<float>(n_codes - 1));
        if (best < 0.0f || error < best) {
          best = error;
          out.scale[r] = s;
          out.minimum[r] = m;
        }
      }
  }
  return out;
}

void q2_k(const float* x, const float* w, uint8_t* block) {
  const auto fit = fit_affine_block<16, 16>(x, w, 4, 15, block + 80, block + 82);
  for (int j = 0; j < 16; ++j) block[j] = static_cast<uint8_t>(fit.scale[j] | (fit.minimum[j] << 4));
  assign_codes<16>(Format::q2_k, x, kSuperBlock, block);
}

void q4_k_or_q5_k(Format format, const float* x, const float* w, uint8_t* block) {
  const auto fit = fit_affine_block<32, 8>(x, w, format == Format::q4_k ? 16 : 32, 63, block, block + 2);
  uint8_t* b = block + 4;
  for (int j = 0; j < 4; ++j) {
    b[j] = static_cast<uint8_t>(fit.scale[j] | ((fit.scale[j + 4] >> 4) << 6));
    b[j + 4] = static_cast<uint8_t>(fit.minimum[j] | ((fit.minimum[j + 4] >> 4) << 6));
    b[j + 8] = static_cast<uint8_t>((fit.scale[j + 4] & 15) | ((fit.minimum[j + 4] & 15) << 4));
  }
  assign_codes<32>(format, x, kSuperBlock, block);
}

// ---- signed scale per run: q3_k, q6_k, iq4_xs ----

// Integers low .. -low - 1 for scales on the f16 unit d; the largest scale becomes `low`, whatever its sign.
template <int N, int kRuns, typename Levels>
std::array<int, kRuns> fit_scaled_block(const float* x, const float* w, const Levels& levels, int low, uint8_t* d_at) {
  std::array<float, kRuns> scales;
  float largest = 0.0f;
  for (int r = 0; r < kRuns; ++r) {
    scales[static_cast<size_t>(r)] = fit_scale<N>(x + r * N, w + r * N, levels);
    if (std::fabs(scales[static_cast<size_t>(r)]) > std::fabs(largest)) largest = scales[static_cast<size_t>(r)];
  }
  const float d = stored_f16(d_at, largest / static_cast<float>(low));
  std::array<int, kRuns> out{};
  for (int r = 0; r < kRuns; ++r) {
    const float scale = scales[static_cast<size_t>(r)];
    const int s0 = d != 0.0f ? std::clamp(static_cast<int>(std::lround(scale / d)), low, -low - 1) : 0;
    float best = -1.0f;
    for (int s = std::max(s0 - 1, low); s <= std::min(s0 + 1, -low - 1); ++s) {
      const float error = scaled_error<N>(x + r * N, w + r * N, d * static_cast<float>(s), levels);
      if (best < 0.0f || error < best) {
        best = error;
        out[static_cast<size_t>(r)] = s;
      }
    }
  }
  return out;
}

void q3_k(const float* x, const float* w, uint8_t* block) {
  const auto scales = fit_scaled_block<16, 16>(x, w, UniformLevels{-4.0f, 3.0f}, -32, block + 108);
  uint8_t* b = block + 96;
  std::fill_n(b, 12, uint8_t{0});
  for (int j = 0; j < 16; ++j) {
    const int s = scales[static_cast<size_t>(j)] + 32;
    b[j % 8] |= static_cast<uint8_t>((s & 15) << (j < 8 ? 0 : 4));
    b[8 + j % 4] |= static_cast<uint8_t>((s >> 4) << (2 * (j / 4)));
  }
  assign_codes<16>(Format::q3_k, x, kSuperBlock, block);
}

void q6_k(const float* x, const float* w, uint8_t* block) {
  const auto scales = fit_scaled_block<16, 16>(x, w, UniformLevels{-32.0f, 31.0f}, -128, block + 208);
  for (int j = 0; j < 16; ++j) block[192 + j] = static_cast<uint8_t>(scales[static_cast<size_t>(j)]);
  assign_codes<16>(Format::q6_k, x, kSuperBlock, block);
}

void iq4_xs(const float* x, const float* w, uint8_t* block) {
  const auto scales = fit_scaled_block<32, 8>(x, w, Iq4LevelSet{}, -32, block);
  uint32_t high = 0;
  std::fill_n(block + 4, 4, uint8_t{0});
  for (int j = 0; j < 8; ++j) {
    const int s = scales[static_cast<size_t>(j)] + 32;
    block[4 + j / 2] |= static_cast<uint8_t>((s & 15) << (4 * (j % 2)));
    high |= static_cast<uint32_t>(s >> 4) << (2 * j);
  }
  store(block + 2, static_cast<uint16_t>(high));
  assign_codes<32>(Format::iq4_xs, x, kSuperBlock, block);
}

// ---- blocks of 32 ----

void scaled_32(Format format, const float* x, const float* w, uint8_t* block) {
  float scale = 0.0f;
  switch (format) {
    case Format::q4_0: scale = fit_scale<32>(x, w, UniformLevels{-8.0f, 7.0f}); break;
    case Format::q5_0: scale = fit_scale<32>(x, w, UniformLevels{-16.0f, 15.0f}); break;
    case Format::q8_0: scale = fit_scale<32>(x, w, UniformLevels{-127.0f, 127.0f}); break;
    default: scale = fit_scale<32>(x, w, Iq4LevelSet{}); break;
  }
  store(block, f32_to_f16(scale));
  assign_codes<32>(format, x, kBlock, block);
}

void affine_32(Format format, const float* x, const float* w, uint8_t* block) {
  const AffineFit fit = fit_affine<32>(x, w, format == Format::q4_1 ? 16 : 32, false);
  store(block, f32_to_f16(fit.scale));
  store(block + 2, f32_to_f16(fit.offset));
  assign_codes<32>(format, x, kBlock, block);
}

}  // namespace

void quantize_weighted(Format format, const float* in, const float* importance, int64_t n, uint8_t* block) {
  const FormatInfo& entry = info(format);
  float x[kSuperBlock], w[kSuperBlock];
  for (int64_t i = 0; i < n; i += entry.block_elems, in += entry.block_elems, block += entry.block_bytes) {
    const int elems = entry.block_elems;
    float sum = 0.0f;
    for (int e = 0; e < elems; ++e) {
      // Weights that are not finite would spoil their whole block; they count as zero, or the largest f16 in case of overflow.
      x[e] = std::isnan(in[e]) ? 0.0f : std::clamp(in[e], -65504.0f, 65504.0f);
      w[e] = importance != nullptr && importance[i + e] > 0.0f && std::isfinite(importance[i + e]) ? importance[i + e] : 0.0f;
      sum += w[e];
    }
    // A column without importance still counts a little, so that its weights stay near their values; a block without any counts evenly.
    const float floor = sum > 0.0f && std::isfinite(sum) ? 1e-4f * sum / static_cast<float>(elems) : 1.0f;
    for (int e = 0; e < elems; ++e) w[e] = (std::isfinite(sum) ? w[e] : 0.0f) + floor;
    switch (format) {
      case Format::q2_k: q2_k(x, w, block); break;
      case Format::q3_k: q3_k(x, w, block); break;
      case Format::q4_k:
      case Format::q5_k: q4_k_or_q5_k(format, x, w, block); break;
      case Format::q6_k: q6_k(x, w, block); break;
      case Format::iq4_xs: iq4_xs(x, w, block); break;
      case Format::q4_1:
      case Format::q5_1: affine_32(format, x, w, block); break;
      case Format::q4_0:
      case Format::q5_0:
      case Format::q8_0:
      case Format::iq4_nl: scaled_32(format, x, w, block); break;
      default: CACHALOT_CHECK(false, "{}", entry.name);
    }
  }
}

}  // namespace cachalot
