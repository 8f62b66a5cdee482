// QuantConfig: what the files of a Hugging Face directory say about how its weights are quantized: config.json's "quantization_config", or
// the older quantize_config.json (GPTQ) and quant_config.json (AWQ) beside it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tensor/canonicalise.h"

namespace cachalot {

struct QuantConfig {
  enum class Scheme : uint8_t {
    none,
    fp8,             // E4M3 weights with one scale, or one per block of 128 x 128
    awq,             // AutoAWQ "GEMM"
    gptq,            // GPTQ v1 and v2
    pack_quantized,  // compressed-tensors; FP8 weights may be among its groups
  };
  Scheme scheme = Scheme::none;
  std::string where;  // "DIR/config.json: quantization_config", for messages
  // Of the integer schemes. 0: there are several values, and each tensor's shape says which. Group -1: the whole row.
  int bits = 0, group = 0;
  GptqVersion version = GptqVersion::v1;
  // Modules that stay as they are, as far as they are named plainly: "lm_head", "model.layers.3".
  std::string kept_key;  // what the file calls them
  std::vector<std::string> kept;
};

// The texts of the three files; "" where there is none. Throws Error naming file and field for schemes, versions and numbers that are not
// read here.
struct QuantConfigTexts {
  std::string directory;  // for messages
  std::string_view config, quantize_config, quant_config;
};
QuantConfig read_quant_config(const QuantConfigTexts& texts);

// Whether the configuration names this module ("model.layers.3.mlp.up_proj"), or one that it is a part of, among those that are kept.
bool is_kept(const QuantConfig& config, std::string_view module);

}  // namespace cachalot
