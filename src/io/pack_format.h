// The first and the last 64 bytes of a pack, as they lie in the file (little-endian). Internal to io/.
#pragma once

#include <cstdint>
#include <string_view>

namespace cachalot {

inline constexpr std::string_view kPackMagic = "CACHPACK", kPackEndMagic = "CACHPEND";
inline constexpr uint32_t kPackByteOrder = 0x01020304;
inline constexpr uint64_t kPackEdge = 64;  // bytes of each

struct PackPrelude {
  char magic[8];
  uint32_t version, byte_order;
  uint8_t zero[48];
};
struct PackTrailer {
  uint64_t header_at, header_bytes, header_hash, file_bytes;
  uint8_t zero[24];
  char magic[8];
};
static_assert(sizeof(PackPrelude) == kPackEdge && sizeof(PackTrailer) == kPackEdge);

}  // namespace cachalot
