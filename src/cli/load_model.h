// LoadedModel: all that a command needs to run a model: its device, configuration, weights, tokenizer and chat template.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "cli/backend.h"
#include "model/decoder.h"
#include "text/tokenizer.h"

namespace cachalot {

struct ModelOptions {
  std::string path;       // GGUF file, safetensors file, or directory
  std::string tokenizer;  // takes the place of the model's own: see load_tokenizer
  std::string device = "cpu";
  int n_threads = 0;  // 0: one per physical core
  bool pin = false;   // as in BackendOptions
  Numa numa = Numa::none;
  int n_cpu_experts = 0;         // of layers below this the routed experts stay with the CPU, on a GPU
  bool batch_invariant = false;  // as in BackendOptions
  int max_context = 0;           // tokens; 0: the smaller of kDefaultContext and the model's own limit
  bool needs_tokenizer = true;
  bool mtp = false;                                                             // load the prediction layer too, where there is one
  bool show_progress = true;                                                    // a bar on stderr, when that is a terminal
  std::function<void(std::span<const LinearSource>, const Linear&)> on_linear;  // told of each weight that was loaded
};

constexpr int kDefaultContext = 4096;  // tokens

struct LoadedModel {
  std::string path;
  std::unique_ptr<Ops> ops;  // outlives the decoder, whose weights live on it
  Config config;             // eos_ids: the union of what config and tokenizer name
  Decoder decoder;
  std::optional<Tokenizer> tokenizer;
  std::string chat_template;           // source text; empty when the model has none
  std::string chat_template_name;      // where it came from, for messages
  std::string generation_config_json;  // empty when the model has none
  int max_context = 0;                 // tokens
  bool batch_invariant = false;
  double load_seconds = 0.0;
};

// Throws Error naming what is missing or wrong; the checkpoint is closed again when it returns.
LoadedModel load_model(const ModelOptions& options);

}  // namespace cachalot
