// A GGUF model seen as its Hugging Face original: llama's q and k rows in halves, kv_b whole. For writers of Hugging Face directories.
#pragma once

#include <memory>

#include "io/checkpoint.h"
#include "model/config.h"

namespace cachalot {

// `gguf` must outlive the view. whole_kv_b: kv_b is there whatever parts of it the file has. `config`, read from it, becomes the
// original's: rotary pairs in halves, and frequency factors named by the parameters they come from where these are Llama 3's (otherwise
// make_hf_config refuses them).
std::unique_ptr<Checkpoint> make_hf_view(const Checkpoint& gguf, Config& config, bool whole_kv_b = true);

}  // namespace cachalot
