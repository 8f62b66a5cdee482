// Fuzz target: config.json and generation_config.json (split at the first NUL byte) into a Config.
#include <cstdint>
#include <string>

#include "base/error.h"
#include "model/config.h"
#include "support/config_only.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const size_t split = text.find('\0');
  try {
    const cachalot::Config c = cachalot::read_config(
        cachalot::test::ConfigOnly(text.substr(0, split), split == std::string::npos ? std::string{} : text.substr(split + 1)));
    if (c.rope.dim <= 256) (void)cachalot::rope_table(c.rope, 16);
  } catch (const cachalot::Error&) {
  }
  return 0;
}
