// From a path to a running engine.
#include "cli/open_engine.h"

#include <filesystem>

#include "base/error.h"
#include "runtime/engine.h"

namespace cachalot {

std::unique_ptr<Engine> make_engine(std::shared_ptr<LoadedModel> model, const EngineOptions& options) {
  std::filesystem::path path(model->path);
  if (!path.has_filename()) path = path.parent_path();
  LoadedModel& loaded = *model;
  if (options.batch_invariant && !loaded.batch_invariant) fail("{}: was not loaded for batch-invariant results", loaded.path);
  return make_engine(*loaded.ops, loaded.decoder, options, path.filename().string(), std::move(model));
}

std::unique_ptr<Engine> open_engine(const std::string& model, const EngineOptions& options) {
  ModelOptions load{.path = model,
                    .device = options.device,
                    .n_threads = options.n_threads,
                    .n_cpu_experts = options.n_cpu_experts,
                    .max_context = options.max_context};
  load.show_progress = false;
  load.mtp = options.speculation == "mtp";
  load.batch_invariant = options.batch_invariant;
  return make_engine(std::make_shared<LoadedModel>(load_model(load)), options);
}

}  // namespace cachalot
