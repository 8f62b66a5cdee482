// A chunk of two groups of rows opened while another one is multiplied, as one piece of assembly: for the codecs that most weights have.
//
// The tiles and the vector units share one window of instructions, which is little longer than a chunk. What the compiler makes of
// open_chunk has a third more of them (copies, addresses), and then the units wait for each other: 55 ns a chunk instead of 47.
// The operations are those of open_chunk, to the bit.
#pragma once

#include "cpu/isa/amx_open.h"
#include "cpu/isa/amx_tiles.h"

namespace cachalot::cpu {
namespace {

// Codes in the lowest four bits of a word, of which the fifth belongs to another code.
template <Codec C>
constexpr HalfTable nibble_table() {
  HalfTable t;
  for (int i = 0; i < 32; ++i) t.v[i] = half_of_nibble<C>(i);
  return t;
}
template <Codec C>
inline constexpr bool kPlainNibbles = C == Codec::q4_0 || C == Codec::q4_1 || C == Codec::q4_k || C == Codec::int4 || C == Codec::mxfp4;
template <Codec C>
inline constexpr bool kInAssembly = kPlainNibbles<C> || C == Codec::q5_0 || C == Codec::q8_0;

// Where the codes of chunk c begin, as open_and_multiply takes them.
template <Codec C>
inline const uint8_t* codes_of_chunk(const WideCodec<C>& codec, int c) {
  if constexpr (kPlainNibbles<C>) {
    return codec.nibbles(c);
  } else {
    return codec.unit.codes(32);
  }
}

// Eight columns, number `e` of the chunk, as f16 in registers p, q, r, s. left and right are the shifts that bring the fifth bits of the
// two steps to their places.
#define CACHALOT_NIBBLES(w, e, left, right)  \
  "vmovdqu64 64*" e "(" w                    \
  "), %[a]\n\t"                              \
  "vpsrlw $4, %[a], %[b]\n\t"                \
  "vpermw %[u], %[a], %[p]\n\t"              \
  "vpermb %[v], %[a], %[r]%{%[k]%}%{z%}\n\t" \
  "vpermw %[u], %[b], %[q]\n\t"              \
  "vpermb %[v], %[b], %[s]%{%[k]%}%{z%}\n\t"
#define CACHALOT_FIVE_BITS(w, e, left, right)                            \
  "vmovdqu64 (" w                                                        \
  "), %[b]\n\t"                                                          \
  "vmovdqu64 64+64*" e "(" w "), %[a]\n\t" left ", %[b], %[p]\n\t" right \
  ", %[b], %[q]\n\t"                                                     \
  "vpternlogd $0xe2, %[a], %[v], %[p]\n\t"                               \
  "vpsrlw $4, %[a], %[a]\n\t"                                            \
  "vpternlogd $0xe2, %[a], %[v], %[q]\n\t"                               \
  "vpsrlw $8, %[p], %[r]\n\t"                                            \
  "vpsrlw $8, %[q], %[s]\n\t"                                            \
  "vpermw %[u], %[p], %[p]\n\t"                                          \
  "vpermw %[u], %[q], %[q]\n\t"                                          \
  "vpermw %[u], %[r], %[r]\n\t"                                          \
  "vpermw %[u], %[s], %[s]\n\t"
#define CACHALOT_BYTES(w, e, left, right)  \
  "vmovdqu64 128*" e "(" w                 \
  "), %[p]\n\t"                            \
  "vmovdqu64 128*" e "+64(" w              \
  "), %[q]\n\t"                            \
  "vpshrdw $8, %[u], %[p], %[r]\n\t"       \
  "vpshrdw $8, %[u], %[q], %[s]\n\t"       \
  "vpternlogd $0xea, %[v], %[x], %[p]\n\t" \
  "vpternlogd $0xea, %[v], %[x], %[q]\n\t" \
  "vsubph %[y], %[p], %[p]\n\t"            \
  "vsubph %[y], %[q], %[q]\n\t"            \
  "vsubph %[y], %[r], %[r]\n\t"            \
  "vsubph %[y], %[s], %[s]\n\t"

#define CACHALOT_FMA(group, number) "vfmadd213ph %[m" group "], %[s" group "], %[" number "]\n\t"
#define CACHALOT_MUL(group, number) "vmulph %[s" group "], %[" number "], %[" number "]\n\t"
// As brain_of_half, and stored.
#define CACHALOT_STORE(number, to)           \
  "vpmulhrsw %[c], %[" number "], %[" number \
  "]\n\t"                                    \
  "vpandd %[d], %[" number "], %[" number    \
  "]\n\t"                                    \
  "vmovdqa64 %[" number "], " to "(%[to])\n\t"
#define CACHALOT_STEP(get, scaled, group, e, to, left, right, tiles)                                                     \
  get("%[w" group "]", e, left, right) tiles scaled(group, "p") scaled(group, "q") scaled(group, "r") scaled(group, "s") \
      CACHALOT_STORE("p", to) CACHALOT_STORE("q", to "+64") CACHALOT_STORE("r", to "+128") CACHALOT_STORE("s", to "+192")

// Tile loads and products, in the order of TileBlock::multiply.
#define CACHALOT_A(m) "tileloadd (%[t" m "],%[stride],1), %%tmm6\n\t"
#define CACHALOT_B(n) "tileloadd 1024*" n "(%[from],%[stride],1), %%tmm7\n\t"
#define CACHALOT_AB(sum) "tdpbf16ps %%tmm7, %%tmm6, %%tmm" sum "\n\t"

#define CACHALOT_CHUNK(get, scaled, t0_, t1_, t2_, t3_, t4_, t5_, t6_, t7_)                                                                \
  __asm__ volatile(CACHALOT_STEP(get, scaled, "0", "0", "0", "vpsllw $4", "vpsllw $3", t0_)                                                \
                       CACHALOT_STEP(get, scaled, "0", "1", "256", "vpsllw $2", "vpsllw $1", t1_)                                          \
                           CACHALOT_STEP(get, scaled, "0", "2", "512", "vpsllw $0", "vpsrlw $1", t2_)                                      \
                               CACHALOT_STEP(get, scaled, "0", "3", "768", "vpsrlw $2", "vpsrlw $3", t3_)                                  \
                                   CACHALOT_STEP(get, scaled, "1", "0", "1024", "vpsllw $4", "vpsllw $3", t4_)                             \
                                       CACHALOT_STEP(get, scaled, "1", "1", "1280", "vpsllw $2", "vpsllw $1", t5_)                         \
                                           CACHALOT_STEP(get, scaled, "1", "2", "1536", "vpsllw $0", "vpsrlw $1", t6_)                     \
                                               CACHALOT_STEP(get, scaled, "1", "3", "1792", "vpsrlw $2", "vpsrlw $3", t7_)                 \
                   : [a] "=&v"(a), [b] "=&v"(b), [p] "=&v"(p), [q] "=&v"(q), [r] "=&v"(r), [s] "=&v"(s)                                    \
                   : [w0] "r"(rows.codes[0]), [w1] "r"(rows.codes[1]), [to] "r"(to), [t0] "r"(tokens[0]), [t1] "r"(tokens[M > 1 ? 1 : 0]), \
                     [t2] "r"(tokens[M > 2 ? 2 : 0]), [from] "r"(from), [stride] "r"(ptrdiff_t{64}), [u] "v"(u), [v] "v"(v), [x] "v"(x),   \
                     [y] "v"(y), [c] "v"(words(0x1000)), [d] "v"(words(0x8fff)), [k] "Yk"(__mmask64{0xaaaaaaaaaaaaaaaaull}),               \
                     [s0] "v"(rows.scale[0]), [m0] "v"(rows.minus[0]), [s1] "v"(rows.scale[1]), [m1] "v"(rows.minus[1]))
#define CACHALOT_CHUNKS(get, scaled)                                                                                                  \
  if constexpr (M == 0) CACHALOT_CHUNK(get, scaled, "", "", "", "", "", "", "", "");                                                  \
  if constexpr (M == 1)                                                                                                               \
    CACHALOT_CHUNK(get, scaled, CACHALOT_A("0"), "", CACHALOT_B("0"), CACHALOT_AB("0"), "", CACHALOT_B("1"), CACHALOT_AB("1"), "");   \
  if constexpr (M == 2)                                                                                                               \
    CACHALOT_CHUNK(get, scaled, CACHALOT_A("0"), CACHALOT_B("0") CACHALOT_AB("0"), CACHALOT_B("1"), CACHALOT_AB("1") CACHALOT_A("1"), \
                   CACHALOT_AB("3"), CACHALOT_B("0"), CACHALOT_AB("2"), "");                                                          \
  if constexpr (M == 3)                                                                                                               \
  CACHALOT_CHUNK(get, scaled, CACHALOT_A("0"), CACHALOT_B("0") CACHALOT_AB("0"), CACHALOT_B("1") CACHALOT_AB("1"),                    \
                 CACHALOT_A("1") CACHALOT_AB("3"), CACHALOT_B("0") CACHALOT_AB("2"), CACHALOT_A("2"), CACHALOT_AB("4"),               \
                 CACHALOT_B("1") CACHALOT_AB("5"))

// A chunk of two groups: codes, and the factors of their rows in pairs of f16.
struct ClosedChunk {
  const uint8_t* codes[2];
  I scale[2], minus[2];
};

// Opens a chunk to `to`, while M tiles of tokens are multiplied with the opened chunk at `from`; M may be 0.
template <Codec C, int M>
__attribute__((always_inline)) inline void open_and_multiply(const ClosedChunk& rows, uint8_t* to, const uint8_t* const* tokens,
                                                             const uint8_t* from) {
  I a, b, p, q, r, s, u, v, x = iset1(0), y = iset1(0);
  if constexpr (kPlainNibbles<C>) {
    alignas(64) static constexpr UpperTable kUpper = upper_table<C>();
    alignas(64) static constexpr HalfTable kWords = nibble_table<C>();
    u = _mm512_load_si512(kWords.v);
    v = _mm512_load_si512(kUpper.v);
    if constexpr (WideCodec<C>::kMinimum) {
      CACHALOT_CHUNKS(CACHALOT_NIBBLES, CACHALOT_FMA);
    } else {
      CACHALOT_CHUNKS(CACHALOT_NIBBLES, CACHALOT_MUL);
    }
  } else if constexpr (C == Codec::q5_0) {
    alignas(64) static constexpr HalfTable kTable = five_bit_table<WideCodec<C>::kOffset>();
    u = _mm512_load_si512(kTable.v);
    v = bset1(16);
    CACHALOT_CHUNKS(CACHALOT_FIVE_BITS, CACHALOT_MUL);
  } else {  // beside the exponent of 1024, whose upper byte is 0x64, a code is the number 1024 + code
    u = words(0x64);
    v = words(0x6400);
    x = words(0xff);
    y = words(half_of_integer(1024 + WideCodec<C>::kOffset));
    CACHALOT_CHUNKS(CACHALOT_BYTES, CACHALOT_MUL);
  }
}

#undef CACHALOT_NIBBLES
#undef CACHALOT_FIVE_BITS
#undef CACHALOT_BYTES
#undef CACHALOT_FMA
#undef CACHALOT_MUL
#undef CACHALOT_STORE
#undef CACHALOT_STEP
#undef CACHALOT_A
#undef CACHALOT_B
#undef CACHALOT_AB
#undef CACHALOT_CHUNK
#undef CACHALOT_CHUNKS

}  // namespace
}  // namespace cachalot::cpu
