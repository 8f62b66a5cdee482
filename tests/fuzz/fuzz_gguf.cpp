// libFuzzer target for the GGUF reader: any bytes are read or refused with an Error, and what is read can be used.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "base/error.h"
#include "io/gguf.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace cachalot;
  try {
    const auto file = GgufFile::from_bytes(std::as_bytes(std::span(data, size)), "fuzz");
    for (const auto& [key, value] : file->metadata()) {
      if (file->find(key) != &value) std::abort();  // keys are unique
      try {
        static_cast<void>(file->number(key));
      } catch (const Error&) {
      }
    }
    unsigned sum = 0;
    for (const TensorInfo& tensor : file->tensors()) {
      if (tensor.shape.empty() || tensor.data.empty()) std::abort();
      sum += static_cast<unsigned>(tensor.data.front()) + static_cast<unsigned>(tensor.data.back());  // must lie in the input
    }
    if (sum == 0x7fffffff) std::abort();  // keeps the reads
  } catch (const Error&) {
  }
  return 0;
}
