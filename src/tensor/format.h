// Format: how the numbers of a weight matrix are stored, and the slow, exact reading of each: the oracle for every kernel.
// Layouts are those of the GGUF block types and of DeepSeek's FP8 checkpoints; docs/formats.md restates them bit by bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace cachalot {

enum class Format : uint8_t {
  f32,
  f16,
  bf16,
  // Blocks of 32.
  q4_0,
  q4_1,
  q5_0,
  q5_1,
  q8_0,
  // Super-blocks of 256.
  q2_k,
  q3_k,
  q4_k,
  q5_k,
  q6_k,
  // Table look-up; mxfp4 is FP4 with an E8M0 scale per 32.
  iq4_nl,
  iq4_xs,
  mxfp4,
  // E4M3 with an f32 scale per 128x128 block, kept in a separate grid.
  fp8_block,
  // AWQ and GPTQ canonicalised: unsigned codes along `in` (code k of a row is the low nibble of byte k/2 for even k), f16 scale and
  // u8 zero per group.
  int4_planar,
  int8_planar
};
inline constexpr int kNumFormats = static_cast<int>(Format::int8_planar) + 1;

struct FormatInfo {
  Format format;
  std::string_view name;  // "q4_k"
  int block_elems;        // elements that one block holds, along the input dimension
  int block_bytes;        // bytes of one block
  int gguf_type;          // ggml type id; -1 when GGUF has none
};
const FormatInfo& info(Format format);
std::optional<Format> format_of_gguf_type(int gguf_type);
std::optional<Format> format_of_name(std::string_view name);
// "Q4_K" and so on for any known ggml type id, also for those that are not supported, so that a refusal can name it.
std::string_view gguf_type_name(int gguf_type);

// Bytes of one row of n elements. n must be a multiple of block_elems.
size_t row_bytes(Format format, int64_t n);
// Bytes of `rows` rows of n elements, for sizes that come from a file: nothing when either is negative, when n is not a whole number
// of blocks, or when the product does not fit.
std::optional<size_t> matrix_bytes(Format format, int64_t rows, int64_t n);

// The side of FP8's square scale blocks.
inline constexpr int kFp8Block = 128;

// Decodes n elements stored in whole blocks at `data` (size row_bytes(format, n)) to f32. Not for fp8_block and the planar
// formats, whose scales lie elsewhere: see dequant_row of a LinearSource.
void dequant_row(Format format, const std::byte* data, int64_t n, float* out);

// Whether quantize_row can write this format: all but mxfp4, fp8_block and the planar ones.
bool can_quantize(Format format);
// Encodes n elements. f32, f16, bf16, q8_0 (d = amax / 127, round half away), q4_0, q4_1, q5_0 and q5_1 are bit-exact with the reference
// quantizers; K-quants and IQ4 fit their scales by least squares. Values that are not finite become some code, never an error.
void quantize_row(Format format, const float* in, int64_t n, std::byte* out);
// The same with the squared error of element k weighted by importance[k], the mean square of the inputs that meet it, in every format
// that has scales. Entries that are not positive and finite count as almost nothing; a block without any as if all were equal.
void quantize_row(Format format, const float* in, std::span<const float> importance, std::byte* out);

// Encodes a matrix [out, in] as FP8: codes [out, in] and scales f32 [ceil(out/128), ceil(in/128)], scale = amax / 448 of the block.
void quantize_fp8_block(const float* in, int out_rows, int in_cols, std::byte* codes, float* scales);

}  // namespace cachalot
