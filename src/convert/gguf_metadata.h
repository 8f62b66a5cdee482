// The metadata that a GGUF file of a model carries. Internal to convert/.
#pragma once

#include "io/gguf_writer.h"
#include "model/config.h"

namespace cachalot {

void write_model_metadata(GgufWriter& out, const Config& config, const std::string& name, Format format);
// The tokenizer beside the checkpoint, padded to the model's vocabulary; "no_vocab" when there is none.
void write_tokenizer_metadata(GgufWriter& out, const Checkpoint& checkpoint, const Config& config);

}  // namespace cachalot
