// convert_to_gguf: a Hugging Face checkpoint as one GGUF file that llama.cpp loads: names, metadata, tokenizer and the layouts it expects
// (llama's q and k rows permuted for adjacent rotary pairs; MLA's kv_b as transposed per-head k_b and v_b; stacked experts).
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/checkpoint.h"

namespace cachalot {

struct ConvertOptions {
  Format format = Format::bf16;  // of matrices: f32, f16, bf16 or q8_0. Norms, biases and routers are f32 whatever this says.
  std::function<void(size_t done_values, size_t total_values)> progress;
  // For writers of quantized models: the format of each matrix by its GGUF name, in place of `format`; general.file_type when it is not
  // negative; further string keys.
  std::function<Format(const std::string& name)> format_of;
  int file_type = -1;
  // Set: the file is made in place, in a folder that is temporary itself, and an earlier run has written so many layers of it (-1: not even
  // embedding, head and final norm).
  std::optional<int> layers_done;
  std::vector<std::pair<std::string, std::string>> metadata;
};

struct ConvertResult {
  int n_tensors = 0;
  size_t bytes = 0;                // of all tensors
  std::vector<std::string> notes;  // what was left out or stored in another format than asked, a line each
};

// The same piece by piece, for models that come into being layer by layer: globals, then every layer in order, then finish. A matrix that
// `model` has in the declared format is written as it stands, another one is rounded to nearest. Errors as below.
class GgufModelWriter {
 public:
  // Metadata, tokenizer and shapes come from `original`.
  GgufModelWriter(const Checkpoint& original, const std::filesystem::path& out, const ConvertOptions& options);
  ~GgufModelWriter();
  void globals(const Checkpoint& model);
  void layer(int layer, const Checkpoint& model);
  [[nodiscard]] int n_layers() const;
  void sync();  // what was written is on the disk
  ConvertResult finish();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// Throws Error when the checkpoint is no safetensors one, or something in it cannot be expressed; then no file is left behind.
ConvertResult convert_to_gguf(const Checkpoint& checkpoint, const std::filesystem::path& out, const ConvertOptions& options);

}  // namespace cachalot
