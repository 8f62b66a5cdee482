// What this CPU and system allow, and the choice of the kernel table that fits: the best level whose needs are all met, or the one that
// the environment variable CACHALOT_ISA names.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "cpu/isa/kernels.h"

namespace cachalot::cpu {

enum CpuFeature : uint32_t {
  kAvx2 = 1u << 0,
  kFma = 1u << 1,
  kF16c = 1u << 2,
  kAvx512f = 1u << 3,
  kAvx512bw = 1u << 4,
  kAvx512dq = 1u << 5,
  kAvx512vl = 1u << 6,
  kAvx512vnni = 1u << 7,
  kAvx512bf16 = 1u << 8,
  kAmxTile = 1u << 9,
  kAmxInt8 = 1u << 10,
  kAmxBf16 = 1u << 11,
  kAvx512fp16 = 1u << 12,
  kAvx512vbmi = 1u << 13,
  kAvx512vbmi2 = 1u << 14,
};

// Bits of CpuFeature that may be used: announced by CPUID, their registers saved by the system (XCR0), and for AMX the kernel's
// permission asked for and granted to this process.
uint32_t detect_features();
// "avx2 fma f16c" and so on.
std::string feature_names(uint32_t features);

struct IsaLevel {
  const char* name;
  uint32_t needs;
  const KernelTable* table;
};
// From the best to the plainest, which needs nothing.
std::span<const IsaLevel> isa_levels();

// The first level whose needs `features` meets; with a `forced` name that level. Throws Error when it is unknown or not met.
const KernelTable& select_kernels(uint32_t features, std::string_view forced = {});
// With this CPU's features and the value of CACHALOT_ISA.
const KernelTable& select_kernels();

}  // namespace cachalot::cpu
