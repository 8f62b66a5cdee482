// The files beside the weights of a Hugging Face directory: config.json, and the tokenizer's files, taken from the original or made.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "io/checkpoint.h"
#include "model/config.h"

namespace cachalot {

struct HfCompanions {
  nlohmann::ordered_json quantization;  // config.json's "quantization_config"
  std::string torch_dtype;              // "" leaves what is there
  std::filesystem::path companions;     // where the tokenizer's files are; empty: beside the original
  bool gptq_file = false;               // quantize_config.json too, which older readers look for
};

// Throws Error naming the file that cannot be read or written. An original in GGUF has no such files: its config.json is made from
// `config`.
void write_hf_companions(const std::filesystem::path& folder, const Checkpoint& original, const Config& config, const HfCompanions& what);

// config.json of a model whose facts come from a GGUF file. Throws Error naming what cannot be said in it.
nlohmann::ordered_json make_hf_config(const Config& config);

}  // namespace cachalot
