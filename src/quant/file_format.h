// FileFormat: the kinds of files that a quantized model is written to, what each of them can hold, and what the Hugging Face ones say about
// it in config.json.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "quant/recipe.h"

namespace cachalot {

enum class FileFormat : uint8_t { gguf, awq, gptq, gptq_v2, compressed_tensors, fp8 };
const char* name_of(FileFormat format);
std::optional<FileFormat> file_format_of_name(std::string_view name);

// What matrices become when nobody says: AWQ's and GPTQ v2's 4 bits with zero points, GPTQ v1's and compressed-tensors' symmetric ones,
// FP8.
std::string default_type(FileFormat format);

// Makes a recipe fit a Hugging Face format: kv_b stays whole, and matrices that the format cannot hold in the recipe's scheme because of
// their shape are kept at 16 bits. Returns a line on each of those. Throws Error when a scheme has no place in the format at all.
std::vector<std::string> fit_recipe(FileFormat format, const Config& config, const Checkpoint& original, Recipe& recipe);

// config.json's "quantization_config". `kept` are further modules that are not quantized (those in the plan as floats are found here).
nlohmann::ordered_json quantization_config(FileFormat format, const Config& config, const std::vector<PlannedMatrix>& plan,
                                           std::vector<std::string> kept);

}  // namespace cachalot
