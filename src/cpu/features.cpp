// CPUID, XCR0 and the AMX permission; the ordered list of levels.
#include "cpu/features.h"

#include <array>
#include <cstdlib>

#include "base/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace cachalot::cpu {
namespace {

struct NamedFeature {
  const char* name;
  uint32_t bit;
};
constexpr std::array<NamedFeature, 15> kNames{{{"avx2", kAvx2},
                                               {"fma", kFma},
                                               {"f16c", kF16c},
                                               {"avx512f", kAvx512f},
                                               {"avx512bw", kAvx512bw},
                                               {"avx512dq", kAvx512dq},
                                               {"avx512vl", kAvx512vl},
                                               {"avx512vnni", kAvx512vnni},
                                               {"avx512bf16", kAvx512bf16},
                                               {"amx-tile", kAmxTile},
                                               {"amx-int8", kAmxInt8},
                                               {"amx-bf16", kAmxBf16},
                                               {"avx512fp16", kAvx512fp16},
                                               {"avx512vbmi", kAvx512vbmi},
                                               {"avx512vbmi2", kAvx512vbmi2}}};

#if defined(__x86_64__)
// The register sets that the system saves on a context switch: bits 1, 2 SSE and AVX; 5 to 7 AVX-512; 17, 18 AMX.
uint64_t saved_state() {
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}
constexpr uint64_t kAvxState = 0x6, kAvx512State = 0xe6, kAmxState = 0x60000;

// Linux gives tile data only to processes that ask (arch_prctl ARCH_REQ_XCOMP_PERM, feature 18).
bool amx_permitted() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

#if defined(__x86_64__)
constexpr uint32_t kAvx2Needs = kAvx2 | kFma | kF16c, kAvx512Needs = kAvx2Needs | kAvx512f | kAvx512bw | kAvx512dq | kAvx512vl;

// A level is a table to which kernels that live in files of their own are added here.
KernelTable with_wide(const KernelTable& base, const char* name, const WideKernels& wide) {
  KernelTable t = base;
  t.name = name;
  t.wide = wide;
  return t;
}
KernelTable with_avx512_floats(KernelTable t) {
  const WideKernels& floats = kAvx512FloatKernels;
  for (int c = 0; c < kNumCodecs; ++c)
    if (floats.product[c] != nullptr) t.wide.product[c] = floats.product[c];
  t.wide.few_tokens = floats.few_tokens;
  t.wide.block_tokens = floats.block_tokens;
  t.wide.scratch_bytes = floats.scratch_bytes;
  t.wide.pack_tokens = floats.pack_tokens;
  return t;
}
KernelTable with_bf16_attention(const KernelTable& base, const char* name) {
  KernelTable t = base;
  t.name = name;
  t.attention[static_cast<int>(Element::bf16)] = kAvx512Bf16Attention;
  return t;
}
KernelTable with_tiles(const KernelTable& base, const char* name) {
  KernelTable t = base;
  t.name = name;
  t.tiles = kAmxKernels;
  t.attention[static_cast<int>(Element::bf16)] = kAmxAttention;
  t.exact_tile_attention[static_cast<int>(Element::f32)] = kAmxF32Attention;
  t.exact_tile_attention[static_cast<int>(Element::f16)] = kAmxF16Attention;
  return t;
}
#endif

}  // namespace

uint32_t detect_features() {
  uint32_t found = 0;
#if defined(__x86_64__)
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return 0;
  const bool saves_registers = (c >> 27) & 1u;  // OSXSAVE: xgetbv exists
  const uint64_t state = saves_registers ? saved_state() : 0;
  if ((state & kAvxState) != kAvxState) return 0;
  if ((c >> 12) & 1u) found |= kFma;
  if ((c >> 29) & 1u) found |= kF16c;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return found;
  if ((b >> 5) & 1u) found |= kAvx2;
  if ((state & kAvx512State) == kAvx512State) {
    if ((b >> 16) & 1u) found |= kAvx512f;
    if ((b >> 17) & 1u) found |= kAvx512dq;
    if ((b >> 30) & 1u) found |= kAvx512bw;
    if ((b >> 31) & 1u) found |= kAvx512vl;
    if ((c >> 1) & 1u) found |= kAvx512vbmi;
    if ((c >> 6) & 1u) found |= kAvx512vbmi2;
    if ((c >> 11) & 1u) found |= kAvx512vnni;
    if ((d >> 23) & 1u) found |= kAvx512fp16;
  }
  uint32_t amx = 0;
  if ((d >> 24) & 1u) amx |= kAmxTile;
  if ((d >> 25) & 1u) amx |= kAmxInt8;
  if ((d >> 22) & 1u) amx |= kAmxBf16;
  if ((amx & kAmxTile) != 0 && (state & kAmxState) == kAmxState && amx_permitted()) found |= amx;
  if ((found & kAvx512f) != 0 && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && ((a >> 5) & 1u)) found |= kAvx512bf16;
#endif
  return found;
}

std::string feature_names(uint32_t features) {
  std::string out;
  for (const NamedFeature& feature : kNames)
    if ((features & feature.bit) != 0) out += (out.empty() ? "" : " ") + std::string(feature.name);
  return out;
}

std::span<const IsaLevel> isa_levels() {
#if defined(__x86_64__)
  static const KernelTable avx2 = with_wide(kAvx2Table, "avx2", kAvx2WideKernels);
  static const KernelTable avx512 = with_avx512_floats(with_wide(kAvx512Table, "avx512", kAvx2WideKernels));
  static const KernelTable avx512vnni = with_avx512_floats(with_wide(kAvx512Table, "avx512vnni", kAvx512VnniKernels));
  static const KernelTable avx512bf16 = with_bf16_attention(avx512vnni, "avx512bf16");
  static const KernelTable amx = with_tiles(avx512bf16, "amx");
#endif
  static const auto levels = std::to_array<IsaLevel>({
#if defined(__x86_64__)
    {"amx", kAvx512Needs | kAvx512vnni | kAvx512bf16 | kAvx512fp16 | kAvx512vbmi | kAvx512vbmi2 | kAmxTile | kAmxInt8 | kAmxBf16, &amx},
        {"avx512bf16", kAvx512Needs | kAvx512vnni | kAvx512bf16, &avx512bf16}, {"avx512vnni", kAvx512Needs | kAvx512vnni, &avx512vnni},
        {"avx512", kAvx512Needs, &avx512}, {"avx2", kAvx2Needs, &avx2},
#endif
    {
      "scalar", 0, &kScalarTable
    }
  });
  return levels;
}

const KernelTable& select_kernels(uint32_t features, std::string_view forced) {
  std::string known;
  for (const IsaLevel& level : isa_levels()) {
    const uint32_t missing = level.needs & ~features;
    if (forced.empty()) {
      if (missing == 0) return *level.table;
      continue;
    }
    if (forced == level.name) {
      if (missing != 0) fail("CACHALOT_ISA: found \"{}\", but this machine lacks {}", printable(forced), feature_names(missing));
      return *level.table;
    }
    known += (known.empty() ? "" : ", ") + std::string(level.name);
  }
  fail("CACHALOT_ISA: found \"{}\", expected one of {}", printable(forced), known);
}

const KernelTable& select_kernels() {
  const char* forced = std::getenv("CACHALOT_ISA");
  return select_kernels(detect_features(), forced == nullptr ? std::string_view{} : std::string_view{forced});
}

}  // namespace cachalot::cpu
