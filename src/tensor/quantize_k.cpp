// Encoders that weigh errors: K-quants, IQ4, and the 32-element blocks when there is importance. Each run is fitted alone (run_fit.h), 16
// runs side by side; in super-blocks its scale and minimum then become small integers, chosen among the neighbours of the rounded ones by
// the error that they leave; codes follow from the values that are stored. The same text is compiled for several instruction sets, which
// give the same bits: there is no fused multiply-add, and each run is summed in its own order.
#include <algorithm>
#include <array>
#include <cmath>

#include "base/check.h"
#include "tensor/block_codes.h"
#include "tensor/run_fit.h"

namespace cachalot {
namespace {

struct Row {
  Format format;
  const float* in;
  const float* importance;  // or null
  int64_t n;
  uint8_t* out;
};

CACHALOT_LANES_INLINE float stored_f16(uint8_t* to, float value) {
  const uint16_t half = f32_to_f16(value);
  store(to, half);
  return f16_to_f32(half);
}

CACHALOT_LANES_INLINE std::array<float, kLanes> numbers(Lanes lanes) {
  std::array<float, kLanes> out;
  std::memcpy(out.data(), &lanes, sizeof out);
  return out;
}
CACHALOT_LANES_INLINE Lanes lanes_of(const std::array<float, kLanes>& numbers) {
  Lanes out;
  std::memcpy(&out, numbers.data(), sizeof out);
  return out;
}

// ---- 16 runs out of a row ----

// Weights that are not finite would spoil their whole block; they count as zero, or the largest f16 in case of overflow. A column without
// importance still counts a little, so that its weights stay near their values; a block without any counts evenly.
CACHALOT_LANES_INLINE void clean_block(const float* in, const float* importance, int elems, float* x, float* w) {
  for (int e = 0; e < elems; ++e) x[e] = std::isnan(in[e]) ? 0.0f : std::min(std::max(in[e], -65504.0f), 65504.0f);
  if (importance == nullptr) {
    std::fill_n(w, elems, 1.0f);
    return;
  }
  float partial[8] = {};
  for (int e = 0; e < elems; ++e) w[e] = importance[e] > 0.0f && importance[e] < 1e30f ? importance[e] : 0.0f;
  for (int e = 0; e < elems; e += 8)
    for (int l = 0; l < 8; ++l) partial[l] += w[e + l];
  const float sum = ((partial[0] + partial[4]) + (partial[1] + partial[5])) + ((partial[2] + partial[6]) + (partial[3] + partial[7]));
  const float floor = sum > 0.0f ? 1e-4f * sum / static_cast<float>(elems) : 1.0f;
  for (int e = 0; e < elems; ++e) w[e] += floor;
}

template <int N>
struct Group {
  Runs<N> runs;
  float x[kLanes * N], w[kLanes * N];  // in the row's order
};

template <int N>
CACHALOT_LANES_INLINE void load_group(const Row& row, int64_t begin, int elems, int n_blocks, Group<N>& group) {
  for (int b = 0; b < n_blocks; ++b)
    clean_block(row.in + begin + b * elems, row.importance != nullptr ? row.importance + begin + b * elems : nullptr, elems,
                group.x + b * elems, group.w + b * elems);
  std::fill(group.x + n_blocks * elems, group.x + kLanes * N, 0.0f);
  std::fill(group.w + n_blocks * elems, group.w + kLanes * N, 1.0f);
  for (int j = 0; j < N; ++j) {
    std::array<float, kLanes> x, w;
    for (size_t l = 0; l < kLanes; ++l) {
      x[l] = group.x[l * N + static_cast<size_t>(j)];
      w[l] = group.w[l * N + static_cast<size_t>(j)];
    }
    group.runs.x[j] = lanes_of(x);
    group.runs.w[j] = lanes_of(w);
  }
}

// Codes of a block from the scales that it holds by now.
template <int N>
CACHALOT_LANES_INLINE void assign_codes(Format format, const float* x, int n_elems, uint8_t* block) {
  const CodeInfo codes = code_info(format);
  float scale[kMaxRuns], offset[kMaxRuns];
  uint8_t q[kSuperBlock];
  read_block_grid(format, reinterpret_cast<const std::byte*>(block), scale, offset);
  for (int r = 0; r < n_elems / N; ++r, x += N) {
    const float inverse = scale[r] != 0.0f ? 1.0f / scale[r] : 0.0f;
    if (N == 16 || codes.levels == nullptr) {
      // A signed scale may be negative, and a zero one has its codes at the offset.
      const float top = static_cast<float>(codes.n_codes - 1);
      const float zero = scale[r] != 0.0f ? 0.0f : format == Format::q3_k ? 4.0f : format == Format::q6_k ? 32.0f : 0.0f;
      for (int j = 0; j < N; ++j) {
        const float v = std::min(std::max((x[j] - offset[r]) * inverse + zero, 0.0f), top);
        q[r * N + j] = static_cast<uint8_t>(static_cast<int>((v + 12582912.0f) - 12582912.0f));
      }
    } else {
      for (int j = 0; j < N; j += kLanes) {
        std::array<float, kLanes> some;
        std::copy_n(x + j, kLanes, some.data());
        const auto code = numbers(Iq4LevelSet{}.code(lanes_of(some) * inverse));
        for (size_t l = 0; l < kLanes; ++l) q[static_cast<size_t>(r * N + j) + l] = static_cast<uint8_t>(static_cast<int>(code[l]));
      }
    }
  }
  write_block_codes(format, q, reinterpret_cast<std::byte*>(block));
}

// ---- scale and minimum per run: q2_k, q4_k, q5_k ----

// Integers of each run, and of each block the f16 units that they count.
struct BlockScales {
  std::array<float, kLanes> scale, minimum;
};

// Integers 0 .. top for scales and minima, on the units d and dmin stored at those offsets of each block.
template <int N>
CACHALOT_LANES_INLINE BlockScales fit_affine_blocks(const Runs<N>& runs, int n_codes, float top, uint8_t* out, int block_bytes, int d_at,
                                                    int dmin_at) {
  constexpr int kRuns = kSuperBlock / N;
  const AffineFit fit = fit_affine(runs, n_codes, true);
  const auto scale = numbers(fit.scale), minimum = numbers(-fit.offset);
  std::array<float, kLanes> d_of, dmin_of;
  for (int b = 0; b < kLanes / kRuns; ++b) {
    const auto first = static_cast<size_t>(b * kRuns);
    float largest_scale = 0.0f, largest_minimum = 0.0f;
    for (size_t r = first; r < first + kRuns; ++r) {
      largest_scale = std::max(largest_scale, scale[r]);
      largest_minimum = std::max(largest_minimum, minimum[r]);
    }
    uint8_t* const block = out + b * block_bytes;
    const float d = stored_f16(block + d_at, largest_scale / top), dmin = stored_f16(block + dmin_at, largest_minimum / top);
    std::fill_n(d_of.begin() + static_cast<ptrdiff_t>(first), kRuns, d);
    std::fill_n(dmin_of.begin() + static_cast<ptrdiff_t>(first), kRuns, dmin);
  }
  const Lanes d = lanes_of(d_of), dmin = lanes_of(dmin_of), zero = spread(0.0f), last = spread(top);
  const Lanes s0 = clamped(round_even(fit.scale * inverse_or_zero(d)), zero, last);
  const Lanes m0 = clamped(round_even(-fit.offset * inverse_or_zero(dmin)), zero, last);
  Lanes best = spread(3e38f), best_scale = s0, best_minimum = m0;
  for (int ds = -1; ds <= 1; ++ds)
    for (int dm = -1; dm <= 1; ++dm) {
      const Lanes s = clamped(s0 + static_cast<float>(ds), zero, last), m = clamped(m0 + static_cast<float>(dm), zero, last);
      const Lanes error = affine_error(runs, d * s, -(dmin * m), static_cast<float>(n_codes - 1));
      best_scale = error < best ? s : best_scale;
      best_minimum = error < best ? m : best_minimum;
      best = smaller(error, best);
    }
  return {numbers(best_scale), numbers(best_minimum)};
}

CACHALOT_LANES_INLINE void q2_k(const Group<16>& group, uint8_t* block) {
  const BlockScales fit = fit_affine_blocks(group.runs, 4, 15.0f, block, 84, 80, 82);
  for (size_t j = 0; j < 16; ++j) block[j] = static_cast<uint8_t>(static_cast<int>(fit.scale[j]) | (static_cast<int>(fit.minimum[j]) << 4));
  assign_codes<16>(Format::q2_k, group.x, kSuperBlock, block);
}

CACHALOT_LANES_INLINE void q4_k_or_q5_k(Format format, const Group<32>& group, int n_blocks, uint8_t* out) {
  const int bytes = format == Format::q4_k ? 144 : 176;
  uint8_t blocks[2 * 176];
  const BlockScales fit = fit_affine_blocks(group.runs, format == Format::q4_k ? 16 : 32, 63.0f, blocks, bytes, 0, 2);
  for (int b = 0; b < n_blocks; ++b) {
    uint8_t* const block = blocks + b * bytes;
    for (int j = 0; j < 4; ++j) {
      const auto at = static_cast<size_t>(b * 8 + j);
      const int s = static_cast<int>(fit.scale[at]), m = static_cast<int>(fit.minimum[at]), s4 = static_cast<int>(fit.scale[at + 4]),
                m4 = static_cast<int>(fit.minimum[at + 4]);
      block[4 + j] = static_cast<uint8_t>(s | ((s4 >> 4) << 6));
      block[8 + j] = static_cast<uint8_t>(m | ((m4 >> 4) << 6));
      block[12 + j] = static_cast<uint8_t>((s4 & 15) | ((m4 & 15) << 4));
    }
    assign_codes<32>(format, group.x + b * kSuperBlock, kSuperBlock, block);
  }
  std::copy_n(blocks, n_blocks * bytes, out);
}

// ---- signed scale per run: q3_k, q6_k, iq4_xs ----

// Integers low .. -low - 1 for scales, on the unit d stored at d_at of each block; the largest scale becomes `low`, whatever its sign.
template <int N, typename Levels>
CACHALOT_LANES_INLINE std::array<float, kLanes> fit_scaled_blocks(const Runs<N>& runs, const Levels& levels, float low, uint8_t* out,
                                                                  int block_bytes, int d_at) {
  constexpr int kRuns = kSuperBlock / N;
  const Lanes fit = fit_scale(runs, levels);
  const auto scales = numbers(fit);
  std::array<float, kLanes> d_of;
  for (int b = 0; b < kLanes / kRuns; ++b) {
    const auto first = static_cast<size_t>(b * kRuns);
    float largest = 0.0f;
    for (size_t r = first; r < first + kRuns; ++r)
      if (std::fabs(scales[r]) > std::fabs(largest)) largest = scales[r];
    std::fill_n(d_of.begin() + static_cast<ptrdiff_t>(first), kRuns, stored_f16(out + b * block_bytes + d_at, largest / low));
  }
  const Lanes d = lanes_of(d_of), first = spread(low), last = spread(-low - 1.0f);
  const Lanes s0 = clamped(round_even(fit * inverse_or_zero(d)), first, last);
  Lanes best = spread(3e38f), best_scale = s0;
  for (int ds = -1; ds <= 1; ++ds) {
    const Lanes s = clamped(s0 + static_cast<float>(ds), first, last), error = scaled_error(runs, d * s, levels);
    best_scale = error < best ? s : best_scale;
    best = smaller(error, best);
  }
  return numbers(best_scale);
}

CACHALOT_LANES_INLINE void q3_k(const Group<16>& group, uint8_t* block) {
  const auto scales = fit_scaled_blocks(group.runs, UniformLevels{-4.0f, 3.0f, 9, true}, -32.0f, block, 110, 108);
  uint8_t* b = block + 96;
  std::fill_n(b, 12, uint8_t{0});
  for (int j = 0; j < 16; ++j) {
    const int s = static_cast<int>(scales[static_cast<size_t>(j)]) + 32;
    b[j % 8] |= static_cast<uint8_t>((s & 15) << (j < 8 ? 0 : 4));
    b[8 + j % 4] |= static_cast<uint8_t>((s >> 4) << (2 * (j / 4)));
  }
  assign_codes<16>(Format::q3_k, group.x, kSuperBlock, block);
}

CACHALOT_LANES_INLINE void q6_k(const Group<16>& group, uint8_t* block) {
  const auto scales = fit_scaled_blocks(group.runs, UniformLevels{-32.0f, 31.0f, 9, true}, -128.0f, block, 210, 208);
  for (size_t j = 0; j < 16; ++j) block[192 + j] = static_cast<uint8_t>(static_cast<int>(scales[j]));
  assign_codes<16>(Format::q6_k, group.x, kSuperBlock, block);
}

CACHALOT_LANES_INLINE void iq4_xs(const Group<32>& group, int n_blocks, uint8_t* out) {
  constexpr int kBytes = 136;
  uint8_t blocks[2 * kBytes];
  const auto scales = fit_scaled_blocks(group.runs, Iq4LevelSet{}, -32.0f, blocks, kBytes, 0);
  for (int b = 0; b < n_blocks; ++b) {
    uint8_t* const block = blocks + b * kBytes;
    uint32_t high = 0;
    std::fill_n(block + 4, 4, uint8_t{0});
    for (int j = 0; j < 8; ++j) {
      const int s = static_cast<int>(scales[static_cast<size_t>(b * 8 + j)]) + 32;
      block[4 + j / 2] |= static_cast<uint8_t>((s & 15) << (4 * (j % 2)));
      high |= static_cast<uint32_t>(s >> 4) << (2 * j);
    }
    store(block + 2, static_cast<uint16_t>(high));
    assign_codes<32>(Format::iq4_xs, group.x + b * kSuperBlock, kSuperBlock, block);
  }
  std::copy_n(blocks, n_blocks * kBytes, out);
}

// ---- blocks of 32 ----

template <typename Levels>
CACHALOT_LANES_INLINE void scaled_32(Format format, const Group<32>& group, const Levels& levels, int n_blocks, int bytes, uint8_t* out) {
  const auto scales = numbers(fit_scale(group.runs, levels));
  for (int b = 0; b < n_blocks; ++b, out += bytes) {
    store(out, f32_to_f16(scales[static_cast<size_t>(b)]));
    assign_codes<32>(format, group.x + b * kBlock, kBlock, out);
  }
}

CACHALOT_LANES_INLINE void affine_32(Format format, const Group<32>& group, int n_blocks, uint8_t* out) {
  const int bytes = format == Format::q4_1 ? 20 : 24;
  const AffineFit fit = fit_affine(group.runs, format == Format::q4_1 ? 16 : 32, false);
  const auto scales = numbers(fit.scale), offsets = numbers(fit.offset);
  for (int b = 0; b < n_blocks; ++b, out += bytes) {
    store(out, f32_to_f16(scales[static_cast<size_t>(b)]));
    store(out + 2, f32_to_f16(offsets[static_cast<size_t>(b)]));
    assign_codes<32>(format, group.x + b * kBlock, kBlock, out);
  }
}

// ---- a row ----

template <int N>
CACHALOT_LANES_INLINE void encode_group(Format format, const Group<N>& group, int n_blocks, uint8_t* out) {
  if constexpr (N == 16) {
    switch (format) {
      case Format::q2_k: return q2_k(group, out);
      case Format::q3_k: return q3_k(group, out);
      default: return q6_k(group, out);
    }
  } else {
    switch (format) {
      case Format::q4_k:
      case Format::q5_k: return q4_k_or_q5_k(format, group, n_blocks, out);
      case Format::iq4_xs: return iq4_xs(group, n_blocks, out);
      case Format::q4_1:
      case Format::q5_1: return affine_32(format, group, n_blocks, out);
      case Format::q4_0: return scaled_32(format, group, UniformLevels{-8.0f, 7.0f, 9, true}, n_blocks, 18, out);
      case Format::q5_0: return scaled_32(format, group, UniformLevels{-16.0f, 15.0f, 9, true}, n_blocks, 22, out);
      case Format::q8_0: return scaled_32(format, group, UniformLevels{-127.0f, 127.0f, 9, false}, n_blocks, 34, out);
      default: return scaled_32(format, group, Iq4LevelSet{}, n_blocks, 18, out);
    }
  }
}

template <int N>
CACHALOT_LANES_INLINE void encode_runs(const Row& row, int elems, int bytes) {
  const int per_group = kLanes * N / elems;
  const auto n_blocks = row.n / elems;
  Group<N> group;
  for (int64_t b = 0; b < n_blocks; b += per_group) {
    const int here = static_cast<int>(std::min<int64_t>(per_group, n_blocks - b));
    load_group(row, b * elems, elems, here, group);
    encode_group(row.format, group, here, row.out + b * bytes);
  }
}

CACHALOT_LANES_INLINE void encode_row(const Row& row) {
  const FormatInfo& entry = info(row.format);
  if (row.format == Format::q2_k || row.format == Format::q3_k || row.format == Format::q6_k)
    encode_runs<16>(row, entry.block_elems, entry.block_bytes);
  else
    encode_runs<32>(row, entry.block_elems, entry.block_bytes);
}

CACHALOT_LANES_FUNCTION(encode, Row, encode_row)

}  // namespace

void quantize_weighted(Format format, const float* in, const float* importance, int64_t n, uint8_t* out) {
  CACHALOT_CHECK(has_block_codes(format), "{}", info(format).name);
  encode({format, in, importance, n, out});
}

}  // namespace cachalot
