// Tile instructions of AMX as inline assembly. GCC 12's intrinsics do not declare the memory that they read, so that it may drop or move
// the stores before them; these do. Tile numbers are fixed by the caller, as the compiler does not know these registers.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace cachalot::cpu {
namespace {

// The operand of LDTILECFG, palette 1: up to 16 rows of up to 64 bytes in each of 8 tiles.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t n_rows[16] = {};
  constexpr void set(int tile, int rows, int bytes) {
    n_rows[tile] = static_cast<uint8_t>(rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};

// Shapes hold until the end of the scope, which leaves the tiles in their initial state: cheaper for the system to save.
class TileScope {
 public:
  explicit TileScope(const TileShapes& shapes) { change(shapes); }
  ~TileScope() { __asm__ volatile("tilerelease" ::: "memory"); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
  static void change(const TileShapes& shapes) { __asm__ volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
};

template <int kTile>
inline void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kTile>
inline void tile_load(const void* p, ptrdiff_t stride) {
  __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(p), "r"(stride) : "memory");
}
// A tile that lies in one piece at p + kOffset. Kept in order with other volatile assembly only, not with what the compiler reads and
// writes: see compiler_barrier.
template <int kTile, int kOffset>
inline void tile_load_piece(const void* p) {
  __asm__ volatile("tileloadd %c1(%2,%3,1), %%tmm%c0" ::"i"(kTile), "i"(kOffset), "r"(p), "r"(ptrdiff_t{64}));
}
inline void compiler_barrier() { __asm__ volatile("" ::: "memory"); }
// Asks for lines of memory to come to the second cache. Assembly, as the compiler drops loops of nothing but its own prefetches.
template <int kLines, int kLine = 0>
inline void ask_for_lines(const void* p) {
  if constexpr (kLine < kLines) {
    __asm__ volatile("prefetcht1 %c1(%0)" ::"r"(p), "i"(kLine * 64));
    ask_for_lines<kLines, kLine + 1>(p);
  }
}
template <int kTile>
inline void tile_store(void* p, ptrdiff_t stride) {
  __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kTile), "r"(p), "r"(stride) : "memory");
}
// kSum += kA kB: kA [M][K] of signed bytes, kB [K / 4][N][4] of unsigned or signed ones, sums of 32 bits.
template <int kSum, int kA, int kB, bool kSigned>
inline void tile_dot_bytes() {
  if constexpr (kSigned) {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
  } else {
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
  }
}
// The same of bf16: kA [M][K], kB [K / 2][N][2], sums in f32.
template <int kSum, int kA, int kB>
inline void tile_dot_bf16() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
}

}  // namespace
}  // namespace cachalot::cpu
