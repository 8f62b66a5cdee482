// The table of single-threaded kernels that each instruction set fills, and their plain arguments.
//
// Files of this folder include only this header, each other and the intrinsics headers: no standard library, nothing inline with external
// linkage. Otherwise the linker could keep the AVX-512 copy of a shared inline function and run it on a CPU without AVX-512.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace cachalot::cpu {

// The packed form of a weight block, chosen by the packer from the stored format. Numbers follow tensor/format.h where one exists there.
enum class Codec : uint8_t {
  f32,
  f16,
  bf16,
  q4_0,
  q4_1,
  q5_0,
  q5_1,
  q8_0,
  q2_k,
  q3_k,
  q4_k,
  q5_k,
  q6_k,
  iq4_nl,
  iq4_xs,
  mxfp4,
  fp8,
  int4,
  int8,
};
inline constexpr int kNumCodecs = static_cast<int>(Codec::int8) + 1;

inline constexpr int kChunk = 32;     // elements that a codec decodes at a time; rows are padded to a multiple with zeros
inline constexpr int kGroupRows = 4;  // rows whose blocks are interleaved: [rows / 4][blocks][4][block bytes]

// Whole groups of rows of one packed matrix.
struct WeightRows {
  const uint8_t* data = nullptr;  // the first group: [n_groups][n_blocks][4][block_bytes]
  const float* scales = nullptr;  // fp8 only: [ceil(rows / 128)][scale_stride], f32, of the matrix's first row
  int64_t scale_stride = 0;       // fp8 only
  int first_row = 0;              // fp8 only: row of `data` within its matrix
  int n_rows = 0;                 // rows wanted; the last group may hold fewer
  int n_cols = 0;                 // elements of a row, a multiple of 32
  int n_blocks = 0;               // blocks of a row
  int block_bytes = 0;
  int block_elems = 0;
};

// y[t][y_col + r] = sum_k w[r][k] x[t][k] (+ bias[r]) (+ beta * y[t][y_col + r]) for t < n_tokens, r < n_rows.
// Every output is one sum per vector lane in rising k, then one fixed tree over the lanes: the same in gemv and in decode + gemm, whatever
// the number of tokens or rows.
struct Product {
  const float* const* x = nullptr;  // [n_tokens] rows of n_cols
  float* const* y = nullptr;        // [n_tokens]
  int y_col = 0;
  int n_tokens = 0;
  const float* bias = nullptr;  // [n_rows] or null
  float beta = 0.0f;
};

enum class Element : uint8_t { f32, f16, bf16 };
inline constexpr int kNumElements = 3;

// A matrix of rows: decoded weights in f32, or keys as they lie in a page.
struct Panel {
  const void* data = nullptr;  // [n_rows][stride]
  int64_t stride = 0;          // bytes
  int n_rows = 0;
  int n_cols = 0;  // a multiple of the vector width: 32 always is
};

// ---- attention ----

inline constexpr int kTileRows = 64;    // most rows of context in a tile
inline constexpr int kRowMultiple = 8;  // scores are computed for rows rounded up to this

// One tile of context for queries that all see it, each up to a row of its own. Queries lie in the lanes of vectors, in groups of `lanes`;
// numbers of a key pass in units of 4 bytes: one f32, or two bf16. So a query's result does not depend on the queries beside it.
struct AttentionTile {
  // [n_rows rounded up to kRowMultiple] rows of context: the last pointer is repeated.
  const void* const* keys = nullptr;
  const void* const* values = nullptr;
  int n_rows = 0, n_queries = 0;
  int k_dim = 0, v_dim = 0;       // multiples of those in AttentionKernels
  const int* visible = nullptr;   // [n_queries rounded up to lanes] how many of the rows each query sees; null: all
  const void* queries = nullptr;  // by pack_queries
  float* scores = nullptr;        // working memory: [groups][kTileRows][lanes]
  float* largest = nullptr;       // [groups][lanes] largest score so far, or one that is smaller by a few units
  float* sum = nullptr;           // [groups][lanes] sum of exp(score - largest)
  float* correction = nullptr;    // working memory: [groups][lanes]
  // [n_queries rounded up to lanes, 8 at least][v_dim] sums of exp(score - largest) times value, for write_row
  float* out = nullptr;
  void* scratch = nullptr;  // AttentionKernels::scratch_bytes, aligned to 64
  bool first = false;       // no tile came before: largest, sum and out are unset
  // What the next tile will read, asked for on the way: ahead_bytes at each of the n_ahead pointers.
  const void* const* ahead[2] = {nullptr, nullptr};
  int n_ahead = 0, ahead_bytes[2] = {0, 0};
};

// Kernels for rows of one format. A query that has seen nothing has largest -inf and sum 0.
struct AttentionKernels {
  int lanes = 0, k_multiple = 1, v_multiple = 1;
  int query_bytes = 4;  // that a number of a query takes in the form that attend wants
  // Queries n x dim times scale in that form, group by group; lanes behind the last are zero: [groups][units][lanes][4 bytes], or as an
  // attend of its own lays them out.
  void (*pack_queries)(const float* const* q, int n, int dim, float scale, void* out) = nullptr;
  // n numbers, a multiple of v_multiple or k_multiple, as a row of this format.
  void (*make_row)(const float* src, int n, void* row) = nullptr;
  void (*attend)(const AttentionTile&) = nullptr;
  size_t (*scratch_bytes)(int k_dim, int v_dim) = nullptr;  // null: none
  // total = total * keep + part * add; n a multiple of v_multiple.
  void (*merge)(float keep, float* total, float add, const float* part, int n) = nullptr;
  // y = factor times a row of `out`, of which y has n numbers.
  void (*write_row)(const float* row, float factor, int n, float* y) = nullptr;
};

// ---- products of the wide layout: of integers with activations rounded to 16 bits, of floats with activations in f32 ----

// Rows of a group in the wide layout of wide_pack.h: one per 32-bit lane of an AVX-512 register, half as many of AVX2.
inline constexpr int kWideRows = 16;
inline constexpr int kScaleChunks = 8;  // 256 activations share a scale

// 32 activations as integers v of at most 127 * 257 in magnitude, in the form that the instruction set multiplies:
//   VNNI, AMX  v = 256 upper + lower: upper[32], lower[32], signed bytes, so that two products with bytes are one with 16 bits
//   AVX2       16 bits each, v0 v2 v1 v3 of every four
struct ActivationChunk {
  uint8_t q[2 * kChunk];
  int32_t minus_8_sum, minus_8_half_sum[2];  // -8 times the sum of v, and of its first and last 16: where products with offset codes start
  float float_sum;                           // the sum of v, exact
};
// A row of activations: x[k] is about scale[k / 256] * v[k].
struct QuantisedRow {
  const ActivationChunk* chunks = nullptr;  // [n / 32]
  const float* scale = nullptr;             // [ceil(n / 256)]: largest magnitude / (127 * 257)
};

// Whole groups of 16 rows of one matrix in the wide layout.
struct WideRows {
  const uint8_t* data = nullptr;  // [n_groups][n_units][unit_bytes]
  int n_rows = 0, n_units = 0, unit_bytes = 0, unit_elems = 0;
  int header_bytes = 0;  // of a unit, before its codes; fp8 only
  // [n_rows in whole groups] or null: exponents of the rows' bounds, which products on tiles find once and keep here; 0: not known yet.
  uint8_t* exponents = nullptr;
};
struct WideProduct {
  const QuantisedRow* x = nullptr;     // [n_tokens]; of integers
  const float* const* rows = nullptr;  // [n_tokens] rows of f32; of floats, for up to few_tokens
  const float* packed = nullptr;       // of floats, for more: see pack_tokens
  float* const* y = nullptr;           // and the rest as in Product
  int y_col = 0;
  int n_tokens = 0;
  const float* bias = nullptr;
  float beta = 0.0f;
  // Products on tiles only:
  const float* factors = nullptr;  // bf16: [n_tokens] or null; y += factor * product, instead of bias and beta
  const uint8_t* tiles = nullptr;  // the tokens' activations, as TileKernels lays them out
  int tile_rows = 16;              // tokens of a tile of bf16; of the last one, what is left
  const float* sums = nullptr;     // byte products: [tile][n / 32][16 tokens] float_sum
  uint8_t* scratch = nullptr;      // WideKernels' or TileKernels' scratch_bytes for the call, aligned to 64
};

struct WideKernels {
  // n is a multiple of 32; the arrays are those of a QuantisedRow.
  void (*quantise)(const float* x, int n, ActivationChunk* chunks, float* scale) = nullptr;
  void (*product[kNumCodecs])(const WideRows&, const WideProduct&) = {};  // null for codecs that have no wide layout
  // Of floats: more than few_tokens pass as [blocks][n_cols][tokens of the block], block_tokens of them but in the last.
  int few_tokens = 0, block_tokens = 0;
  size_t scratch_bytes = 0;
  void (*pack_tokens)(const float* const* x, int n_tokens, int n_cols, float* out) = nullptr;  // one block
};

// ---- products on tiles (AMX), for many tokens ----

inline constexpr int kTileTokenRows = 16;  // tokens of a tile of activations
inline constexpr int kTileBytes = 1024;    // of such a tile: 16 rows of 64 bytes
constexpr int tiles_of(int n_tokens) { return (n_tokens + kTileTokenRows - 1) / kTileTokenRows; }
// A tile is multiplied in a time that grows with its rows, so as few tiles as can be share the tokens evenly.
constexpr int even_tile_rows(int n_tokens) { return (n_tokens + tiles_of(n_tokens) - 1) / tiles_of(n_tokens); }

// Activations of up to 16 tokens and 32 columns are a tile, tiles lie [token tile][n / 32], tokens past the end are zero:
//   bytes    [16 tokens]: upper[32], lower[32] of an ActivationChunk
//   bf16     [16 tokens][32] times 2^64, of every eight columns the even ones first; or as pairs [16 pairs of columns][16 tokens][2]
struct TileKernels {
  size_t (*scratch_bytes)(int n_cols) = nullptr;
  // Each fills one tile row of n_cols / 32 tiles from up to 16 tokens.
  void (*gather_bytes)(const QuantisedRow* x, int n_tokens, int n_cols, uint8_t* tiles, float* sums) = nullptr;
  void (*gather_bf16)(const float* const* x, int n_tokens, int n_cols, uint8_t* tiles) = nullptr;
  void (*gather_pairs)(const float* const* x, int n_tokens, int n_cols, uint8_t* tiles) = nullptr;
  // The products of WideKernels, to the bit; from tiles of bytes.
  void (*bytes[kNumCodecs])(const WideRows&, const WideProduct&) = {};
  // Weights and activations rounded to bf16, summed in f32; from tiles of bf16.
  void (*bf16[kNumCodecs])(const WideRows&, const WideProduct&) = {};
  // silu(gate x) * (up x) in tiles of bf16 for the next product: row r is column y_col + r of h, [token tile][h_chunks]. All rows are whole
  // groups; y, bias, beta and factors are not used.
  void (*swiglu[kNumCodecs])(const WideRows& gate, const WideRows& up, const WideProduct&, uint8_t* h, int h_chunks) = {};
  // The same of a panel of up to 64 decoded rows of f32; from tiles of pairs.
  void (*gemm_bf16)(const Panel&, const WideProduct&) = nullptr;
};

struct KernelTable {
  const char* name = nullptr;
  int gemv_max_tokens = 1;  // up to here gemv decodes in registers; above, decode to a panel and gemm

  void (*gemv[kNumCodecs])(const WeightRows&, const Product&) = {};
  void (*decode[kNumCodecs])(const WeightRows&, float* panel, int64_t stride) = {};  // n_rows rounded up to 4 rows of n_cols
  void (*gemm[kNumElements])(const Panel&, const Product&) = {};

  WideKernels wide;   // empty below AVX2
  TileKernels tiles;  // empty below AMX

  // y = x / sqrt(mean(x^2) + eps) * w; y may be x.
  void (*rmsnorm)(const float* x, const float* w, float eps, int n, float* y) = nullptr;
  // residual += delta, then as rmsnorm.
  void (*add_rmsnorm)(float* residual, const float* delta, const float* w, float eps, int n, float* y) = nullptr;
  void (*silu_mul)(const float* gate, const float* up, int n, float* y) = nullptr;  // y may be either input
  void (*exp)(const float* x, int n, float* y) = nullptr;
  void (*sigmoid)(const float* x, int n, float* y) = nullptr;
  void (*axpy)(float a, const float* x, int n, float* y) = nullptr;  // y += a x
  // Rotates dim numbers at x; table: cos[dim / 2], sin[dim / 2].
  void (*rope)(float* x, const float* table, int dim, bool interleaved) = nullptr;

  // n_rows rows of n numbers, row strides in bytes on the side of `Element`, in floats on the other.
  void (*load_rows)(Element from, const void* src, size_t src_stride, int n_rows, int n, float* dst, int64_t dst_stride) = nullptr;
  // Rows of E4M3 codes as in ops/kv_layout.h: `rank` codes in groups of 128, a scale for each group, then bf16 up to n numbers.
  void (*load_fp8_rows)(const void* src, size_t src_stride, int n_rows, int rank, int n, float* dst, int64_t dst_stride) = nullptr;
  void (*store_row)(Element to, const float* src, int n, void* dst) = nullptr;

  // By the format of the rows; without functions where rows must be converted to f32 first.
  AttentionKernels attention[kNumElements];
  // The same for many queries of each row, on tiles but as exact as in f32; without functions where there are none.
  AttentionKernels exact_tile_attention[kNumElements];
};

// Constants, so that no code of a higher instruction set runs before one of them was chosen.
extern const KernelTable kScalarTable, kAvx2Table, kAvx512Table;
extern const WideKernels kAvx2WideKernels, kAvx512VnniKernels, kAvx512FloatKernels;
extern const AttentionKernels kAvx512Bf16Attention;
extern const AttentionKernels kAmxAttention, kAmxF32Attention, kAmxF16Attention;
extern const TileKernels kAmxKernels;

}  // namespace cachalot::cpu
