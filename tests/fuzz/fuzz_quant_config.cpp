// Fuzz target: the quantization_config of a directory, in config.json or the older files (the first byte says which).
#include <cstdint>
#include <string_view>

#include "base/error.h"
#include "io/quant_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  cachalot::QuantConfigTexts texts{.directory = "dir", .config = {}, .quantize_config = {}, .quant_config = {}};
  (data[0] % 3 == 0 ? texts.config : data[0] % 3 == 1 ? texts.quantize_config : texts.quant_config) = text;
  try {
    const cachalot::QuantConfig config = cachalot::read_quant_config(texts);
    (void)cachalot::is_kept(config, "model.layers.3.mlp.up_proj");
  } catch (const cachalot::Error&) {
  }
  return 0;
}
