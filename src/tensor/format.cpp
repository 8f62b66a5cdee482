// The table of weight formats and the choice of decoder.
#include "tensor/format.h"

#include <array>
#include <limits>

#include "base/check.h"
#include "tensor/dequant.h"

namespace cachalot {
namespace {

constexpr std::array<FormatInfo, kNumFormats> kFormats{{
    {Format::f32, "f32", 1, 4, 0},
    {Format::f16, "f16", 1, 2, 1},
    {Format::bf16, "bf16", 1, 2, 30},
    {Format::q4_0, "q4_0", 32, 18, 2},
    {Format::q4_1, "q4_1", 32, 20, 3},
    {Format::q5_0, "q5_0", 32, 22, 6},
    {Format::q5_1, "q5_1", 32, 24, 7},
    {Format::q8_0, "q8_0", 32, 34, 8},
    {Format::q2_k, "q2_k", 256, 84, 10},
    {Format::q3_k, "q3_k", 256, 110, 11},
    {Format::q4_k, "q4_k", 256, 144, 12},
    {Format::q5_k, "q5_k", 256, 176, 13},
    {Format::q6_k, "q6_k", 256, 210, 14},
    {Format::iq4_nl, "iq4_nl", 32, 18, 20},
    {Format::iq4_xs, "iq4_xs", 256, 136, 23},
    {Format::mxfp4, "mxfp4", 32, 17, 39},
    {Format::fp8_block, "fp8_block", 1, 1, -1},
    {Format::int4_planar, "int4_planar", 2, 1, -1},
    {Format::int8_planar, "int8_planar", 1, 1, -1},
}};

constexpr bool table_is_in_order() {
  for (int i = 0; i < kNumFormats; ++i)
    if (static_cast<int>(kFormats[static_cast<size_t>(i)].format) != i) return false;
  return true;
}
static_assert(table_is_in_order());

// Indexed by ggml type id. Empty entries are ids whose types were withdrawn.
constexpr std::array<std::string_view, 43> kGgufTypeNames{
    "F32",   "F16",    "Q4_0",  "Q4_1", "",     "",        "Q5_0",   "Q5_1",    "Q8_0",  "Q8_1",   "Q2_K",
    "Q3_K",  "Q4_K",   "Q5_K",  "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S",
    "IQ2_S", "IQ4_XS", "I8",    "I16",  "I32",  "I64",     "F64",    "IQ1_M",   "BF16",  "",       "",
    "",      "TQ1_0",  "TQ2_0", "",     "",     "",        "MXFP4",  "NVFP4",   "Q1_0",  "Q2_0"};

}  // namespace

const FormatInfo& info(Format format) { return kFormats[static_cast<size_t>(format)]; }

std::optional<Format> format_of_gguf_type(int gguf_type) {
  for (const FormatInfo& entry : kFormats)
    if (entry.gguf_type >= 0 && entry.gguf_type == gguf_type) return entry.format;
  return std::nullopt;
}

std::optional<Format> format_of_name(std::string_view name) {
  for (const FormatInfo& entry : kFormats)
    if (entry.name == name) return entry.format;
  return std::nullopt;
}

std::string_view gguf_type_name(int gguf_type) {
  if (gguf_type < 0 || gguf_type >= static_cast<int>(kGgufTypeNames.size())) return "unknown";
  const std::string_view name = kGgufTypeNames[static_cast<size_t>(gguf_type)];
  return name.empty() ? "unknown" : name;
}

std::optional<size_t> matrix_bytes(Format format, int64_t rows, int64_t n) {
  const FormatInfo& entry = info(format);
  int64_t row = 0, total = 0;
  if (rows < 0 || n < 0 || n % entry.block_elems != 0) return std::nullopt;
  if (__builtin_mul_overflow(n / entry.block_elems, int64_t{entry.block_bytes}, &row)) return std::nullopt;
  if (__builtin_mul_overflow(row, rows, &total)) return std::nullopt;
  return static_cast<size_t>(total);
}

size_t row_bytes(Format format, int64_t n) {
  const auto bytes = matrix_bytes(format, 1, n);
  CACHALOT_CHECK(bytes.has_value(), "{} elements in blocks of {}", n, info(format).block_elems);
  return *bytes;
}

void dequant_row(Format format, const std::byte* data, int64_t n, float* out) {
  const FormatInfo& entry = info(format);
  CACHALOT_CHECK(n >= 0 && n % entry.block_elems == 0, "{} elements in blocks of {}", n, entry.block_elems);
  const auto* bytes = reinterpret_cast<const uint8_t*>(data);
  switch (format) {
    case Format::f32:
    case Format::f16:
    case Format::bf16: return dequant_float(format, bytes, n, out);
    case Format::q4_0:
    case Format::q4_1:
    case Format::q5_0:
    case Format::q5_1:
    case Format::q8_0: return dequant_legacy(format, bytes, n, out);
    case Format::q2_k:
    case Format::q3_k:
    case Format::q4_k:
    case Format::q5_k:
    case Format::q6_k: return dequant_k(format, bytes, n, out);
    case Format::iq4_nl:
    case Format::iq4_xs:
    case Format::mxfp4: return dequant_table(format, bytes, n, out);
    case Format::fp8_block:
    case Format::int4_planar:
    case Format::int8_planar: break;
  }
  CACHALOT_CHECK(false, "{} keeps its scales elsewhere", entry.name);
}

}  // namespace cachalot
