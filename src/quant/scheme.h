// Scheme: what a matrix is stored as: a GGUF block type, planar integers in groups, FP8 blocks, or plain floats.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "tensor/format.h"

namespace cachalot {

struct Scheme {
  Format format = Format::bf16;
  int group = 0;           // planar formats: elements of a row that share a scale; 0: the whole row
  bool symmetric = false;  // planar formats: the zero point is the middle code, and costs nothing
  bool operator==(const Scheme&) const = default;
};

[[nodiscard]] constexpr bool is_planar(Format format) { return format == Format::int4_planar || format == Format::int8_planar; }
[[nodiscard]] constexpr bool is_float(Format format) { return format == Format::f32 || format == Format::f16 || format == Format::bf16; }
[[nodiscard]] constexpr int planar_bits(Format format) { return format == Format::int4_planar ? 4 : 8; }
// Elements of a group in rows of `in`.
[[nodiscard]] constexpr int group_of(const Scheme& scheme, int in) { return scheme.group > 0 ? scheme.group : in; }

// Bits of one weight in a matrix of `in` columns as files store it, scales and (packed) zero points included.
double bits_per_weight(const Scheme& scheme, int in);
// "int4 g128 zp", "int8 row sym", "q4_k".
std::string name_of(const Scheme& scheme);
// The reverse; also without spaces ("int4-g128-sym"). "zp" when neither word is there, g128 when no group is.
std::optional<Scheme> scheme_of_name(std::string_view name);

// Whether rows of `in` elements can be stored so.
bool fits(const Scheme& scheme, int in);
// The nearest scheme that fits rows of `in`: planar groups shrink to 64 and 32, then become the whole row; super-blocks become blocks of 32
// with a bit more (llama.cpp's choice: q2_k, q3_k -> q4_0, q4_k -> q5_0, q5_k -> q5_1, q6_k -> q8_0; iq4_xs -> iq4_nl), then f16.
Scheme fallback(const Scheme& scheme, int in);

}  // namespace cachalot
