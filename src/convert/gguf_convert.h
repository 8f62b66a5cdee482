// convert_to_gguf: a Hugging Face checkpoint as one GGUF file that llama.cpp loads: names, metadata, tokenizer and the layouts it expects
// (llama's q and k rows permuted for adjacent rotary pairs; MLA's kv_b as transposed per-head k_b and v_b; stacked experts).
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "io/checkpoint.h"

namespace cachalot {

struct ConvertOptions {
  Format format = Format::bf16;  // of matrices: f32, f16, bf16 or q8_0. Norms, biases and routers are f32 whatever this says.
  std::function<void(size_t done_values, size_t total_values)> progress;
};

struct ConvertResult {
  int n_tensors = 0;
  size_t bytes = 0;                // of all tensors
  std::vector<std::string> notes;  // what was left out or stored in another format than asked, a line each
};

// Throws Error when the checkpoint is no safetensors one, or something in it cannot be expressed; then no file is left behind.
ConvertResult convert_to_gguf(const Checkpoint& checkpoint, const std::filesystem::path& out, const ConvertOptions& options);

}  // namespace cachalot
