// An engine on a loaded model, for commands that also want its tokenizer and chat template.
#pragma once

#include <memory>

#include "cachalot/engine.h"
#include "cli/load_model.h"

namespace cachalot {

// The engine keeps the model alive. Throws Error for options that do not fit it.
std::unique_ptr<Engine> make_engine(std::shared_ptr<LoadedModel> model, const EngineOptions& options);

}  // namespace cachalot
