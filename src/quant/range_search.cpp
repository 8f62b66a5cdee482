// The search for ranges, 16 groups at a time, one in each lane; sums over a group keep the group's order.
#include "quant/range_search.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <vector>

#include "tensor/lanes.h"

namespace cachalot {
namespace {

typedef uint32_t BitLanes __attribute__((vector_size(kLanes * sizeof(uint32_t))));  // NOLINT(modernize-use-using): as Lanes

struct LaneRange {
  Lanes scale, zero;
};

// Numbers that are not negative, rounded to f16: 11 significant bits, below 2^-14 steps of 2^-24; from 65520 on infinite.
CACHALOT_LANES_INLINE Lanes rounded_to_f16(Lanes v) {
  const auto bits = (BitLanes)v;
  const BitLanes normal = (bits + 0xfffu + ((bits >> 13) & 1u)) & ~BitLanes{} << 13;
  const Lanes small = (v + 0.5f) - 0.5f;
  const Lanes rounded = v < 0x1p-14f ? small : (Lanes)normal;
  return v < 65520.0f ? rounded : spread(std::numeric_limits<float>::infinity());
}

CACHALOT_LANES_INLINE LaneRange range_of(Lanes low, Lanes high, float top, bool symmetric) {
  const Lanes none = spread(0.0f);
  if (symmetric) return {rounded_to_f16(2.0f * larger(absolute(low), absolute(high)) / top), spread((top + 1.0f) / 2.0f)};
  low = smaller(low, none);
  high = larger(high, none);
  const Lanes scale = rounded_to_f16((high - low) / top);
  const Lanes zero = round_even(clamped(-low / (scale > none ? scale : spread(1.0f)), none, spread(top)));
  return {scale, scale > none ? zero : none};
}

// Weights and importance of up to 16 groups, [group] lanes each.
struct Tile {
  const float *x, *w;
  size_t group;
  Lanes low, high;
};

CACHALOT_LANES_INLINE Lanes error_of(const Tile& tile, const LaneRange& range, float top) {
  const Lanes none = spread(0.0f), inverse = range.scale > none ? 1.0f / (range.scale > none ? range.scale : spread(1.0f)) : none;
  const Lanes least = -range.zero, most = top - range.zero;
  Lanes sum = none;
  for (size_t k = 0; k < tile.group; ++k) {
    const Lanes x = load_lanes(tile.x + k * kLanes), d = x - round_even(clamped(x * inverse, least, most)) * range.scale;
    sum += load_lanes(tile.w + k * kLanes) * d * d;
  }
  return sum;
}

CACHALOT_LANES_INLINE LaneRange best_range(const Tile& tile, float top, bool symmetric, RangeSearch search) {
  LaneRange best = range_of(tile.low, tile.high, top, symmetric);
  if (search == RangeSearch::span) return best;
  Lanes best_error = error_of(tile, best, top);
  constexpr int kSteps = 20;
  for (int i = 1; i <= kSteps; ++i) {
    const float shrink = 1.0f - 0.025f * static_cast<float>(i);
    // Both ends together, then each alone: the far tail is often on one side.
    for (int side = 0; side < (symmetric ? 1 : 3); ++side) {
      const LaneRange range =
          range_of(side == 1 ? tile.low : tile.low * shrink, side == 2 ? tile.high : tile.high * shrink, top, symmetric);
      const Lanes error = error_of(tile, range, top);
      best.scale = error < best_error ? range.scale : best.scale;
      best.zero = error < best_error ? range.zero : best.zero;
      best_error = error < best_error ? error : best_error;
    }
  }
  return best;
}

struct Job {
  const float* values;
  const float* importance;
  int rows, in;
  GroupKind kind;
  RangeSearch search;
  GroupRange* out;
};

CACHALOT_LANES_INLINE void search_all(const Job& job) {
  const int group = job.kind.group, per_row = job.in / group, n = job.rows * per_row;
  const auto length = static_cast<size_t>(group);
  std::vector<float> x(length * kLanes), w(length * kLanes);
  Tile tile{x.data(), w.data(), length, {}, {}};
  for (int first = 0; first < n; first += kLanes) {
    // Lanes without a group of their own repeat the last one.
    for (int l = 0; l < kLanes; ++l) {
      const int g = std::min(first + l, n - 1);
      const float* const from = job.values + static_cast<ptrdiff_t>(g) * group;
      const float* const weight = job.importance != nullptr ? job.importance + g % per_row * group : nullptr;
      for (int k = 0; k < group; ++k) {
        const auto at = static_cast<size_t>(k * kLanes + l);
        x[at] = from[k];
        w[at] = weight != nullptr ? weight[k] : 1.0f;
      }
    }
    tile.low = tile.high = load_lanes(tile.x);
    for (size_t k = 1; k < length; ++k) {
      const Lanes v = load_lanes(tile.x + k * kLanes);
      tile.low = smaller(v, tile.low);
      tile.high = larger(v, tile.high);
    }
    const LaneRange best = best_range(tile, static_cast<float>(job.kind.top), job.kind.symmetric, job.search);
    for (int l = 0; l < kLanes && first + l < n; ++l) job.out[first + l] = {best.scale[l], static_cast<int>(best.zero[l])};
  }
}

CACHALOT_LANES_FUNCTION(run_search, Job, search_all)

}  // namespace

void search_ranges(const float* values, const float* importance, int rows, int in, const GroupKind& kind, RangeSearch search,
                   GroupRange* out) {
  run_search({values, importance, rows, in, kind, search, out});
}

void choose_nearest(const float* values, const GroupKind& kind, const GroupRange& range, uint8_t* codes) {
  const auto zero = static_cast<float>(range.zero), top = static_cast<float>(kind.top);
  if (!(range.scale > 0.0f)) return void(std::fill_n(codes, kind.group, static_cast<uint8_t>(range.zero)));
  for (int k = 0; k < kind.group; ++k) {
    constexpr float kMagic = 12582912.0f;  // adding 1.5 * 2^23 leaves no bits for a fraction
    const float steps = std::min(std::max(values[k] / range.scale, -zero), top - zero);
    codes[k] = static_cast<uint8_t>((steps + kMagic) - kMagic + zero);
  }
}

}  // namespace cachalot
