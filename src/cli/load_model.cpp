// Opens a model and everything around it.
#include "cli/load_model.h"

#include <algorithm>
#include <chrono>

#include "base/error.h"
#include "cli/load_tokenizer.h"
#include "cli/progress.h"

namespace cachalot {
namespace {

int choose_context(const ModelOptions& options, const Config& config) {
  if (options.max_context == 0) return std::min(kDefaultContext, config.max_positions);
  if (options.max_context > config.max_positions)
    fail("--max-model-len: found {}, expected at most {}, the model's limit", options.max_context, config.max_positions);
  return options.max_context;
}

void join_end_tokens(Config& config, const Tokenizer& tokenizer) {
  for (const int id : tokenizer.eos_ids())
    if (std::find(config.eos_ids.begin(), config.eos_ids.end(), id) == config.eos_ids.end()) config.eos_ids.push_back(id);
}

void find_chat_template(LoadedModel& model, const Checkpoint& checkpoint) {
  model.chat_template = checkpoint.chat_template_file();
  model.chat_template_name = model.path + "/chat_template.jinja";
  if (!model.chat_template.empty() || !model.tokenizer) return;
  model.chat_template = model.tokenizer->chat_template();
  model.chat_template_name =
      model.path + (checkpoint.gguf() != nullptr ? ": tokenizer.chat_template" : "/tokenizer_config.json: chat_template");
}

// Whether a GPU's memory, which routed experts could leave, may be too small for the model; once nothing of it is loaded.
bool experts_could_leave(Ops& ops, const Checkpoint& checkpoint, const Config& config, const ModelOptions& options) {
  if (ops.host_memory() || config.n_experts == 0 || options.n_cpu_experts >= config.n_layers) return false;
  size_t bytes = 0;
  for (const TensorInfo& tensor : checkpoint.tensors()) bytes += tensor.data.size();
  return bytes > ops.memory().free / 10 * 9;
}

}  // namespace

LoadedModel load_model(const ModelOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  LoadedModel model;
  model.path = options.path;
  const BackendOptions backend{
      .n_threads = options.n_threads, .pin = options.pin, .numa = options.numa, .batch_invariant = options.batch_invariant};
  HybridOps* hybrid = nullptr;
  if (options.n_cpu_experts > 0) {
    auto both = make_gpu_and_cpu(options.device, backend);
    hybrid = both.get();
    model.ops = std::move(both);
  } else {
    model.ops = make_ops(options.device, backend);
  }
  model.batch_invariant = options.batch_invariant;
  const auto checkpoint = Checkpoint::open(options.path, PackedModels::accept);
  model.config = read_config(*checkpoint);
  model.max_context = choose_context(options, model.config);
  if (!options.tokenizer.empty())
    model.tokenizer.emplace(load_tokenizer(options.tokenizer));
  else if (options.needs_tokenizer)
    model.tokenizer.emplace(tokenizer_of(*checkpoint, model.config.eos_ids));
  if (model.tokenizer) join_end_tokens(model.config, *model.tokenizer);
  find_chat_template(model, *checkpoint);
  model.generation_config_json = checkpoint->generation_config_json();

  ProgressBar bar("loading", options.show_progress);
  LoadOptions load{
      .max_positions = model.max_context, .mtp = options.mtp, .progress = [&](size_t done, size_t total) { bar.update(done, total); }};
  if (hybrid != nullptr) {
    load.n_host_experts = options.n_cpu_experts;
    load.pack_on_host = [&](std::span<const LinearSource> sources) {
      Linear w = hybrid->pack_on_host(sources);
      if (options.on_linear) options.on_linear(sources, w);
      return w;
    };
  }
  if (options.on_linear)
    load.pack = [&](std::span<const LinearSource> sources) {
      Linear w = pack_linear(*checkpoint, *model.ops, sources);
      options.on_linear(sources, w);
      return w;
    };
  try {
    model.decoder = Decoder::load(*checkpoint, model.config, *model.ops, load);
  } catch (const Error& error) {
    if (!experts_could_leave(*model.ops, *checkpoint, model.config, options)) throw;
    fail("{}. --cpu-experts N leaves the routed experts of the first N layers with the CPU", error.what());
  }
  model.load_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return model;
}

}  // namespace cachalot
