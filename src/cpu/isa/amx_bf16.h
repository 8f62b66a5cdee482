// Products on AMX tiles in bf16: of weights in the wide layout, and of decoded rows.
//
// Two groups of 16 rows pass together, with up to three tiles of tokens: six tiles of sums stay in registers for all columns. While the
// tiles of one chunk of columns are multiplied, the vector units open the weights of a later one.
#pragma once

#include "cpu/isa/amx_blocks.h"
#include "cpu/isa/amx_chunk.h"
#include "cpu/isa/bf16_form.h"

namespace cachalot::cpu {
namespace {

constexpr int kPairBytes = 2 * kTileBytes;  // of a chunk of two groups, opened
constexpr int kMostTiles = 3;               // of tokens at a time
constexpr int kAheadChunks = 2;             // opened before they are multiplied: tiles cannot read stores that are still on their way
constexpr int kRingChunks = 4;              // of opened weights: they stay in the first cache, beside the tokens that pass through it
constexpr int kFinishChunk = 3;             // of an item, before which the sums of the one before are taken: they have arrived in the cache
constexpr int kSumsBytes = kMostTiles * kPairBytes;
// Pairs of up to so many chunks are opened once for so many tiles of tokens or more.
constexpr int kWholeChunks = 24, kWholeTiles = 8;

// Two groups of rows, which may be of different matrices of one shape.
struct RowPair {
  const WideRows* shape;
  const uint8_t* group[2];
  RowFactors factors[2];
  [[nodiscard]] int chunks_per_unit() const { return shape->unit_elems / kChunk; }
  [[nodiscard]] int64_t chunks() const { return static_cast<int64_t>(shape->n_units) * chunks_per_unit(); }
};
template <Codec C>
inline RowPair row_pair(const WideRows& w, const uint8_t* first, const WideRows& other, const uint8_t* second) {
  const int64_t bytes = static_cast<int64_t>(w.n_units) * w.unit_bytes;
  return {.shape = &w, .group = {first, second}, .factors = {row_factors<C>(w, first, bytes), row_factors<C>(other, second, bytes)}};
}

// A pair and the tiles of tokens that it is multiplied with at a time.
struct Item {
  RowPair pair;
  int number, tile, m;  // of the pair; first tile, tiles
};
// Takes the sums of an item: [tile of tokens][group] tiles of f32.
struct Results {
  const void* context;
  void (*take)(const void* context, const Item& item, const uint8_t* sums);
};

constexpr int64_t kAskedBytes = 4096;  // ahead of what is read

// Asks for what comes later in two groups, of which [begin, end) is read now.
inline void ask_for_pair(const uint8_t* first, const uint8_t* second, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += kRowBytes) {
    __builtin_prefetch(first + kAskedBytes + i, 0, 2);
    __builtin_prefetch(second + kAskedBytes + i, 0, 2);
  }
}
// Lines of a chunk of a group, scales included.
template <Codec C>
constexpr int chunk_lines() {
  switch (C) {
    case Codec::q5_0:
    case Codec::q5_k: return 6;
    case Codec::q5_1:
    case Codec::q6_k: return 7;
    case Codec::q8_0:
    case Codec::int8:
    case Codec::fp8: return 9;
    case Codec::f16: return 16;
    default: return 5;
  }
}

constexpr int64_t kRingMask = (kRingChunks - 1) * kPairBytes;

// What is done while a chunk is opened: nothing, or the products of an earlier one.
struct NoProducts {
  template <int N>
  void operator()(Step<N>) const {}
  template <Codec C>
  __attribute__((always_inline)) void open(const ClosedChunk& rows, uint8_t* to) const {
    open_and_multiply<C, 0>(rows, to, &to, to);
  }
};
template <int M>
struct Products {
  static constexpr int kParts = 2 * kOpenSteps;
  const uint8_t* tokens[M];
  const uint8_t* ring;
  int64_t from;  // bytes from the ring's begin to the chunk that is multiplied

  __attribute__((always_inline)) void pass() {
    for (int m = 0; m < M; ++m) tokens[m] += kTileBytes;
    from = (from + kPairBytes) & kRingMask;
  }
  // Part N of a chunk's.
  template <int N>
  __attribute__((always_inline)) void operator()(Step<N>) {
    using Block = TileBlock<M>;
    Block::template multiply_pieces<Block::kProducts * N / kParts, Block::kProducts*(N + 1) / kParts>(tokens, ring + from);
    if constexpr (N == kParts - 1) pass();
  }
  template <Codec C>
  __attribute__((always_inline)) void open(const ClosedChunk& rows, uint8_t* to) {
    open_and_multiply<C, M>(rows, to, tokens, ring + from);
    pass();
  }
  __attribute__((always_inline)) void multiply() {
    TileBlock<M>::multiply_pieces(tokens, ring + from);
    pass();
  }
};

// Opens chunks [begin, end) of a pair, which `after` follows: chunk c to `memory` at (slot + c) * kPairBytes & mask.
template <Codec C, typename Meanwhile>
__attribute__((always_inline)) inline void open_chunks(const RowPair& w, const RowPair& after, int64_t begin, int64_t end, uint8_t* memory,
                                                       int64_t slot, int64_t mask, Meanwhile&& meanwhile) {
  const int per_unit = w.chunks_per_unit();
  const int64_t unit_bytes = w.shape->unit_bytes, chunk_bytes = unit_bytes / per_unit, unit = begin / per_unit;
  const int64_t group_bytes = w.shape->n_units * unit_bytes;
  const uint8_t *first = w.group[0] + unit * unit_bytes, *second = w.group[1] + unit * unit_bytes;
  int64_t to = ((slot + begin) * kPairBytes) & mask;
  for (auto c = static_cast<int>(begin - unit * per_unit); begin < end; c = 0, first += unit_bytes, second += unit_bytes) {
    const WideCodec<C> codec_0(Unit{first, 0}), codec_1(Unit{second, 0});
    const OpenUnit<C> unit_0(codec_0, *w.shape, w.factors[0].up), unit_1(codec_1, *w.shape, w.factors[1].up);
    const int64_t here = first - w.group[0] + kAskedBytes, behind = here - group_bytes;
    const uint8_t* ask_0 = (behind < 0 ? w.group[0] + here : after.group[0] + behind) + c * chunk_bytes;
    const uint8_t* ask_1 = (behind < 0 ? w.group[1] + here : after.group[1] + behind) + c * chunk_bytes;
    const int c_end = end - begin < per_unit - c ? c + static_cast<int>(end - begin) : per_unit;
    for (; c < c_end; ++c, ++begin, ask_0 += chunk_bytes, ask_1 += chunk_bytes, to = (to + kPairBytes) & mask) {
      ask_for_lines<chunk_lines<C>()>(ask_0);
      ask_for_lines<chunk_lines<C>()>(ask_1);
      if constexpr (kInAssembly<C>) {
        ClosedChunk rows{.codes = {codes_of_chunk<C>(codec_0, c), codes_of_chunk<C>(codec_1, c)}, .scale = {}, .minus = {}};
        load_factors<C>(unit_0.scales, c, &rows.scale[0], rows.minus[0]);
        load_factors<C>(unit_1.scales, c, &rows.scale[1], rows.minus[1]);
        meanwhile.template open<C>(rows, memory + to);
      } else {
        unit_0.open(
            c, memory + to, [&](auto step) __attribute__((always_inline)) { meanwhile(step); });
        unit_1.open(
            c, memory + to + kTileBytes, [&](auto step) __attribute__((always_inline)) { meanwhile(Step<kOpenSteps + step.value>{}); });
      }
    }
  }
}

// Where the opened chunks of an item lie.
struct Ring {
  uint8_t* memory;
  int64_t slot = 0;  // of the item's chunk 0
};

// Multiplies an item whose first chunks were opened, opens the first chunks of the next one, if there is one, meanwhile, and passes the
// sums of the one before on.
template <Codec C, int M>
void multiply_item(const Item& item, const Item* next, const Item* before, const uint8_t* a, Ring ring, uint8_t* sums,
                   const uint8_t* sums_before, const Results& results) {
  using Block = TileBlock<M>;
  const int64_t n = item.pair.chunks(), ahead = n < kAheadChunks ? n : kAheadChunks;
  const int64_t take_at = n < kFinishChunk ? n : kFinishChunk;
  const RowPair& after = next != nullptr ? next->pair : item.pair;
  const struct {
    const RowPair* pair;
    int64_t begin, end, slot;
  } parts[] = {{&item.pair, ahead, take_at, ring.slot},
               {&item.pair, take_at, n, ring.slot},
               {&after, 0, next != nullptr ? ahead : 0, ring.slot + n}};
  Products<M> products{.tokens = {}, .ring = ring.memory, .from = (ring.slot * kPairBytes) & kRingMask};
  for (int m = 0; m < M; ++m) products.tokens[m] = a + m * n * kTileBytes;
  Block::zero();
  compiler_barrier();
  for (const auto& part : parts) {
    open_chunks<C>(*part.pair, after, part.begin, part.end, ring.memory, part.slot, kRingMask, products);
    if (&part == parts && before != nullptr) results.take(results.context, *before, sums_before);
  }
  for (int64_t c = next != nullptr ? n : n - ahead; c < n; ++c) products.multiply();
  Block::store(sums, kPairBytes);
}
// Tiles of weights: chunk c of group g at data + c chunk_step + g group_step. Those of bf16 lie like that, others were opened.
struct WeightTiles {
  const uint8_t* data;
  int64_t chunk_step, group_step;
};
// A tile store that comes a microsecond after the one before takes 900 cycles, whatever it stores; so one is made every few chunks.
constexpr int kStoreChunks = 8;
template <int M>
void multiply_tiles(const WeightTiles& w, int64_t chunks, const uint8_t* a, bool asks, uint8_t* sums) {
  using Block = TileBlock<M>;
  const int64_t a_step = chunks * kTileBytes;
  const uint8_t* b = w.data;
  Block::zero();
  for (int64_t c = 0; c < chunks; ++c, a += kTileBytes, b += w.chunk_step) {
    if (asks) ask_for_pair(b, b + w.group_step, 0, kTileBytes);
    if (c % kStoreChunks == 0) tile_store<7>(sums, kRowBytes);
    Block::multiply_range(a, a_step, b, w.group_step);
  }
  Block::store(sums, kPairBytes);
}
inline void multiply_tiles(const WeightTiles& w, const Item& item, const uint8_t* a, bool asks, uint8_t* sums) {
  const int64_t chunks = item.pair.chunks();
  if (item.m == 1) multiply_tiles<1>(w, chunks, a, asks, sums);
  if (item.m == 2) multiply_tiles<2>(w, chunks, a, asks, sums);
  if (item.m == 3) multiply_tiles<3>(w, chunks, a, asks, sums);
}

// Tiles [begin, end) of tokens in blocks of up to three.
struct TokenBlocks {
  int begin, end;
  [[nodiscard]] int n() const { return (end - begin + kMostTiles - 1) / kMostTiles; }
  // Block i of a pair's; `before` is block i - 1.
  [[nodiscard]] Item first(const RowPair& pair, int number) const { return {pair, number, begin, (end - begin) / n()}; }
  [[nodiscard]] Item after(const Item& before, int i) const {
    return {before.pair, before.number, before.tile + before.m, (end - begin + i) / n()};
  }
};

// Multiplies all pairs, each opened once for all tokens or not to be opened.
template <Codec C, typename PairAt>
inline void multiply_whole_pairs(int n_pairs, const PairAt& pair_at, const uint8_t* tiles, const TokenBlocks& blocks, uint8_t* scratch,
                                 const Results& results) {
  for (int number = 0; number < n_pairs; ++number) {
    Item item = blocks.first(pair_at(number), number);
    const int64_t chunks = item.pair.chunks();
    WeightTiles weights{.data = item.pair.group[0], .chunk_step = kTileBytes, .group_step = item.pair.group[1] - item.pair.group[0]};
    uint8_t* const sums = scratch + (chunks < kRingChunks ? kRingChunks : chunks) * kPairBytes;
    if constexpr (C != Codec::bf16) {
      open_chunks<C>(item.pair, item.pair, 0, chunks, scratch, 0, ~int64_t{0}, NoProducts{});
      weights = {.data = scratch, .chunk_step = kPairBytes, .group_step = kTileBytes};
    }
    for (int i = 0; i < blocks.n(); ++i) {
      if (i > 0) item = blocks.after(item, i);
      multiply_tiles(weights, item, tiles + item.tile * chunks * kTileBytes, C == Codec::bf16 && i == 0, sums);
      results.take(results.context, item, sums);
    }
  }
}
// Multiplies all pairs, which are opened again for every block of tokens: the ring stays in the first cache.
template <Codec C, typename PairAt>
inline void multiply_pairs_in_ring(int n_pairs, const PairAt& pair_at, const uint8_t* tiles, const TokenBlocks& blocks, uint8_t* scratch,
                                   const Results& results) {
  Ring ring{.memory = scratch};
  uint8_t *sums = scratch + kRingChunks * kPairBytes, *sums_before = sums + kSumsBytes;
  Item before{}, item = blocks.first(pair_at(0), 0), next{};
  const int64_t chunks = item.pair.chunks();
  open_chunks<C>(item.pair, item.pair, 0, chunks < kAheadChunks ? chunks : kAheadChunks, ring.memory, 0, kRingMask, NoProducts{});
  for (int i = 0, n_items = n_pairs * blocks.n(); i < n_items; ++i) {
    const int block = (i + 1) % blocks.n();
    const bool last = i + 1 == n_items;
    if (!last) next = block == 0 ? blocks.first(pair_at(item.number + 1), item.number + 1) : blocks.after(item, block);
    const uint8_t* const a = tiles + item.tile * chunks * kTileBytes;
    const Item *const then = last ? nullptr : &next, *const earlier = i == 0 ? nullptr : &before;
    if (item.m == 1) multiply_item<C, 1>(item, then, earlier, a, ring, sums, sums_before, results);
    if (item.m == 2) multiply_item<C, 2>(item, then, earlier, a, ring, sums, sums_before, results);
    if (item.m == 3) multiply_item<C, 3>(item, then, earlier, a, ring, sums, sums_before, results);
    if (last) results.take(results.context, item, sums);
    uint8_t* const other = sums_before;
    sums_before = sums;
    sums = other;
    ring.slot += chunks;
    before = item;
    item = next;
  }
}
// Weights of short rows, opened, fit the second cache beside the tokens: many tiles take them from there.
template <Codec C, typename PairAt>
inline void multiply_pairs(int n_pairs, const PairAt& pair_at, const uint8_t* tiles, int64_t chunks, const TokenBlocks& blocks,
                           uint8_t* scratch, const Results& results) {
  if (C == Codec::bf16 || (chunks <= kWholeChunks && blocks.end - blocks.begin >= kWholeTiles))
    return multiply_whole_pairs<C>(n_pairs, pair_at, tiles, blocks, scratch, results);
  if constexpr (C != Codec::bf16) multiply_pairs_in_ring<C>(n_pairs, pair_at, tiles, blocks, scratch, results);
}

// Tiles of tokens that stay in the second cache while all rows pass.
inline int tokens_block(int64_t chunks) {
  constexpr int64_t kBytes = 1024 * 1024;
  const int64_t fitting = kBytes / (chunks * kTileBytes) / kMostTiles * kMostTiles;
  return static_cast<int>(fitting < kMostTiles ? kMostTiles : fitting);
}
inline F sums_row(const uint8_t* sums, int tile, int t, int group) {
  return load(reinterpret_cast<const float*>(sums + (2 * tile + group) * kTileBytes + t * kRowBytes));
}

// Where the pair's results go: rows [row, row + 32) of a product, or as many as it has.
struct PairResults {
  const WideProduct& p;
  int row, n_rows, n_groups;

  // The sums of m tiles of tokens.
  void finish(const RowFactors* factors, const uint8_t* sums, int tile, int m) const {
    const F first = factors[0].down, second = factors[1].down;
    const bool whole = row + 2 * kWideRows <= n_rows && p.bias == nullptr;
    for (int i = 0; i < m; ++i) {
      const int t0 = (tile + i) * p.tile_rows, n = p.n_tokens - t0 < p.tile_rows ? p.n_tokens - t0 : p.tile_rows;
      if (whole && p.factors != nullptr) {
        for (int t = 0; t < n; ++t) {
          float* const y = p.y[t0 + t] + p.y_col + row;
          const F factor = set1(p.factors[t0 + t]);
          store(y, fma(mul(sums_row(sums, i, t, 0), first), factor, load(y)));
          store(y + kWidth, fma(mul(sums_row(sums, i, t, 1), second), factor, load(y + kWidth)));
        }
      } else if (whole && p.beta == 0.0f) {
        for (int t = 0; t < n; ++t) {
          float* const y = p.y[t0 + t] + p.y_col + row;
          store(y, mul(sums_row(sums, i, t, 0), first));
          store(y + kWidth, mul(sums_row(sums, i, t, 1), second));
        }
      } else {
        for (int t = 0; t < n; ++t)
          for (int g = 0; g < n_groups; ++g) finish_group(g, t0 + t, mul(sums_row(sums, i, t, g), factors[g].down));
      }
    }
  }
  void finish_group(int g, int t, F sum) const {
    const int at = row + g * kWideRows;
    if (p.factors == nullptr) return finish_wide(p, at, n_rows, t, sum);
    float* const y = p.y[t] + p.y_col + at;
    const int n = n_rows - at < kWideRows ? n_rows - at : kWideRows;
    const auto lanes = static_cast<__mmask16>((1u << n) - 1);
    _mm512_mask_storeu_ps(y, lanes, fma(set1(p.factors[t]), sum, _mm512_maskz_loadu_ps(lanes, y)));
  }
};

template <Codec C>
void bf16_product(const WideRows& w, const WideProduct& p) {
  const TileScope scope(bf16_shapes(p.tile_rows));
  const int64_t group_bytes = static_cast<int64_t>(w.n_units) * w.unit_bytes;
  const int64_t chunks = static_cast<int64_t>(w.n_units) * w.unit_elems / kChunk;
  const int n_tiles = tiles_of(p.n_tokens), n_groups = (w.n_rows + kWideRows - 1) / kWideRows;
  const int block = tokens_block(chunks);
  const auto pair_at = [&](int i) {
    const int g = 2 * i, other = g + 1 < n_groups ? g + 1 : g;
    return row_pair<C>(w, w.data + g * group_bytes, w, w.data + other * group_bytes);
  };
  const struct Context {
    const WideProduct& p;
    int n_rows, n_groups;
  } context{p, w.n_rows, n_groups};
  const Results results{&context, [](const void* from, const Item& item, const uint8_t* sums) {
                          const auto& [product, n_rows, groups] = *static_cast<const Context*>(from);
                          PairResults{product, 2 * item.number * kWideRows, n_rows, 2 * item.number + 1 < groups ? 2 : 1}.finish(
                              item.pair.factors, sums, item.tile, item.m);
                        }};
  for (int begin = 0; begin < n_tiles; begin += block)
    multiply_pairs<C>((n_groups + 1) / 2, pair_at, p.tiles, chunks, {begin, n_tiles - begin < block ? n_tiles : begin + block}, p.scratch,
                      results);
}

// Within 7e-5, of which rounding to bf16 leaves nothing.
inline F swiglu(F gate, F up) {
  const F e = Bf16Form::exp_of(vmin(set1(100.0f), sub(zero(), gate)));  // the minimum keeps NaN, which is its second operand
  return mul(mul(gate, up), _mm512_rcp14_ps(add(set1(1.0f), e)));
}

// Writes rows of tiles for the next product: [token tile][h_chunks] from column p.y_col on.
struct SwigluResults {
  const WideProduct& p;
  uint8_t* h;
  int h_chunks;

  void finish(const Item& item, const uint8_t* sums) const {
    const F factor = set1(kActivationFactor), gate = item.pair.factors[0].down, up = item.pair.factors[1].down;
    const __m512i order = _mm512_set_epi32(15, 13, 11, 9, 14, 12, 10, 8, 7, 5, 3, 1, 6, 4, 2, 0);
    const int column = p.y_col + item.number * kWideRows;
    for (int i = 0; i < item.m; ++i) {
      uint8_t* const to = h + (static_cast<int64_t>(item.tile + i) * h_chunks + column / kChunk) * kTileBytes + column % kChunk * 2;
      for (int t = 0; t < p.tile_rows; ++t) {
        const F y = swiglu(mul(sums_row(sums, i, t, 0), gate), mul(sums_row(sums, i, t, 1), up));
        const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_permutexvar_ps(order, mul(y, factor)));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + t * kRowBytes), reinterpret_cast<__m256i>(rounded));
      }
    }
  }
};
template <Codec C>
void bf16_swiglu(const WideRows& gate, const WideRows& up, const WideProduct& p, uint8_t* h, int h_chunks) {
  const TileScope scope(bf16_shapes(p.tile_rows));
  const int64_t group_bytes = static_cast<int64_t>(gate.n_units) * gate.unit_bytes;
  const int64_t chunks = static_cast<int64_t>(gate.n_units) * gate.unit_elems / kChunk;
  const int n_tiles = tiles_of(p.n_tokens), n_groups = (gate.n_rows + kWideRows - 1) / kWideRows;
  const int block = tokens_block(chunks);
  const auto pair_at = [&](int g) { return row_pair<C>(gate, gate.data + g * group_bytes, up, up.data + g * group_bytes); };
  const SwigluResults context{p, h, h_chunks};
  const Results results{&context, [](const void* from, const Item& item, const uint8_t* sums) {
                          static_cast<const SwigluResults*>(from)->finish(item, sums);
                        }};
  for (int begin = 0; begin < n_tiles; begin += block)
    multiply_pairs<C>(n_groups, pair_at, p.tiles, chunks, {begin, n_tiles - begin < block ? n_tiles : begin + block}, p.scratch, results);
}

inline void gather_bf16(const float* const* x, int n_tokens, int n_cols, uint8_t* tiles) {
  for (int k = 0; k < n_cols; k += kChunk)
    for (int t = 0; t < kTileTokenRows; ++t, tiles += kRowBytes)
      _mm512_storeu_si512(tiles, t < n_tokens ? tile_row(load(x[t] + k), load(x[t] + k + kWidth)) : iset1(0));
}

}  // namespace
}  // namespace cachalot::cpu
