// libFuzzer target for packed files: as a whole, and the header's text alone, which a checksum keeps the fuzzer from in the whole.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string_view>

#include "base/error.h"
#include "io/pack_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace cachalot;
  try {
    static_cast<void>(PackFile::from_bytes(std::as_bytes(std::span(data, size)), "fuzz"));
  } catch (const Error&) {
  }
  try {
    constexpr uint64_t kEnd = 1u << 20;
    const PackHeader header = parse_pack_header({reinterpret_cast<const char*>(data), size}, "fuzz", kEnd);
    const auto inside = [](const PackBlob& blob) {
      if (blob.at > kEnd || blob.bytes > kEnd - blob.at || blob.hashes.size() != (blob.bytes + kPackChunk - 1) / kPackChunk) std::abort();
    };
    for (const auto& [name, blob] : header.vectors) inside(blob);
    for (const PackLinear& linear : header.linears) {
      if (linear.sources.empty()) std::abort();
      inside(linear.description);
      for (const PackBlob& blob : linear.buffers) inside(blob);
    }
  } catch (const Error&) {
  }
  return 0;
}
