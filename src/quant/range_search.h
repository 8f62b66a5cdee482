// The ranges of integer groups: the scale and zero point that codes 0 .. top stand on, as AutoAWQ and GPTQ define them, either those that
// span a group's weights or the narrower ones that leave the least error.
#pragma once

#include <cstdint>

namespace cachalot {

// How the scale of a planar group or an FP8 block is found. (Block formats always fit; see tensor/run_fit.h.)
enum class RangeSearch : uint8_t {
  span,  // from the smallest to the largest weight of the group
  fit,   // the span that leaves the least error, weighted by importance: a narrower one clips, FP8 with importance also tries wider ones
};

struct GroupRange {
  float scale = 0.0f;  // as stored: a value of f16
  int zero = 0;
};

struct GroupKind {
  int group = 0, top = 0;  // weights of a group; the last code
  bool symmetric = false;
};

// The ranges of all groups of `rows` rows of `in` weights, row after row: out [rows, in / group]. importance [in], or null.
void search_ranges(const float* values, const float* importance, int rows, int in, const GroupKind& kind, RangeSearch search,
                   GroupRange* out);
// The codes of one group, the nearest.
void choose_nearest(const float* values, const GroupKind& kind, const GroupRange& range, uint8_t* codes);

}  // namespace cachalot
