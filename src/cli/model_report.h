// What `inspect` tells about a model without loading it.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "io/checkpoint.h"

namespace cachalot {

// The whole report as data: "architecture", "config", "tensors", "types", "kv_bytes_per_token", "tokenizer", "notes", "problems".
// Parts that cannot be read (an architecture that is not supported, a missing tokenizer) become a line of "problems".
nlohmann::ordered_json model_report(const Checkpoint& checkpoint);

// The same for a person; the list of tensors only when asked for.
std::string report_text(const nlohmann::ordered_json& report, bool with_tensors);

}  // namespace cachalot
