// Flags that several commands share: which model on which device, and how tokens are drawn.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cachalot/engine.h"
#include "cli/load_model.h"

namespace cachalot {

// Accepts finite numbers in [low, high].
CLI::Validator number_between(double low, double high);

struct ModelFlags {
  std::string model, model_argument, tokenizer, device = "cpu", kv_cache_dtype = "auto", numa = "none";
  bool pin = false;
  int threads = 0, n_cpu_experts = 0, max_model_len = 0, block_size = 16, prefill_chunk = 512;
  double memory_utilization = 0.9;

  [[nodiscard]] ModelOptions options() const;
};
// -m, --device, -t, --pin, --numa, --cpu-experts: for every command that runs a model.
void add_model_flags(CLI::App& command, ModelFlags& flags);
// The same, where the model may also be named without -m. choose_model(), once flags are read, throws when it was not named, or twice.
void add_model_flags_or_argument(CLI::App& command, ModelFlags& flags);
void choose_model(const CLI::App& command, ModelFlags& flags);
// Those without -m.
void add_device_flags(CLI::App& command, ModelFlags& flags);
// --kv-cache-dtype, --block-size.
void add_kv_flags(CLI::App& command, ModelFlags& flags);
// Those, -c and --prefill-chunk: for commands that generate.
void add_cache_flags(CLI::App& command, ModelFlags& flags);
// For one request at a time.
EngineOptions engine_options(const ModelFlags& flags, const LoadedModel& model);

struct SamplingFlags {
  std::optional<float> temperature, top_p, min_p, repetition_penalty;
  std::optional<int> top_k;
  float presence_penalty = 0.0f, frequency_penalty = 0.0f;
  int64_t seed = -1;  // -1: a new one for each run
  std::vector<std::string> logit_bias, stop;
  int max_tokens = -1, logprobs = -1;
  bool ignore_eos = false;
};
void add_sampling_flags(CLI::App& command, SamplingFlags& flags);

// What applies: a flag, else the model's generation_config.json, else temperature 0.8 and top-p 0.95. Throws Error for a bias that names no
// token, or a generation config with impossible values.
SamplingOptions sampling_options(const SamplingFlags& flags, const LoadedModel& model);

}  // namespace cachalot
