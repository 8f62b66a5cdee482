// Writing a model's weights in the form that a device keeps them in. Reading them back is Decoder::load of a packed checkpoint.
#pragma once

#include <filesystem>
#include <functional>

#include "io/checkpoint.h"
#include "ops/ops.h"

namespace cachalot {

struct PackModelOptions {
  bool replace = false;  // a pack that is in the directory already
  std::function<void(size_t done_bytes, size_t total_bytes)> progress;
};
struct PackModelResult {
  std::filesystem::path file;
  uint64_t bytes = 0;  // of that file
  int n_linears = 0;
};

// Writes a pack of the whole model to `directory`, which may exist: the files of configuration and tokenizer, then the weights, one after
// the other, so that memory does not grow with the model. Throws Error when the device has no packed form, when the directory holds a
// model, and when the disk is full (the unfinished file is removed).
PackModelResult write_packed_model(const Checkpoint& source, Ops& ops, const std::filesystem::path& directory,
                                   const PackModelOptions& options = {});

}  // namespace cachalot
