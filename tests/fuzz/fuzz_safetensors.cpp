// libFuzzer target for the safetensors reader and, on the same bytes as text, the shard index.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string_view>

#include "base/error.h"
#include "io/safetensors.h"
#include "io/shard_index.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace cachalot;
  try {
    const auto file = SafetensorsFile::from_bytes(std::as_bytes(std::span(data, size)), "fuzz");
    size_t covered = 0;
    unsigned sum = 0;
    for (const TensorInfo& tensor : file->tensors()) {
      covered += tensor.data.size();
      if (!tensor.data.empty()) sum += static_cast<unsigned>(tensor.data.front()) + static_cast<unsigned>(tensor.data.back());
    }
    if (covered > size || sum == 0x7fffffff) std::abort();
  } catch (const Error&) {
  }
  try {
    const auto index = ShardIndex::from_text({reinterpret_cast<const char*>(data), size}, "fuzz");
    for (const auto& [tensor, file] : index.weight_map) {
      if (tensor.empty() || index.files.at(file).find('/') != std::string::npos) std::abort();
    }
  } catch (const Error&) {
  }
  return 0;
}
