// From files to a Tokenizer: a tokenizer.json, a model directory, or a GGUF file.
#pragma once

#include <filesystem>

#include "io/checkpoint.h"
#include "io/gguf.h"
#include "model/config.h"
#include "text/tokenizer.h"

namespace cachalot {

// The tokenizer that a checkpoint carries; `eos_ids` are joined with its own end tokens. Throws Error when there is none.
Tokenizer tokenizer_of(const Checkpoint& checkpoint, const std::vector<int>& eos_ids = {});

// path: tokenizer.json itself (with its tokenizer_config.json beside it, when there), a directory that holds one, or a .gguf file; the
// directory need not hold a model.
Tokenizer load_tokenizer(const std::filesystem::path& path);

// What raw text begins with: the BOS token, or -1 where the tokenizer adds none. A model that was trained without BOS may do far worse
// behind one: it may lack the attention sink that it makes of any other first token.
int bos_before_text(const Tokenizer& tokenizer, const Config& config);

// The tokenizer.* keys of GGUF metadata as plain data.
VocabData vocab_data_of(const GgufFile& gguf);

}  // namespace cachalot
