// Makes engines: a thread around EngineCore.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "cachalot/engine.h"
#include "runtime/engine_core.h"

namespace cachalot {

// An engine on any model. Of `options`, only what concerns requests is read: targets, prefix_cache. `owner` is kept alive for as long as
// the model is in use.
std::unique_ptr<Engine> make_engine(std::unique_ptr<StepModel> model, const EngineOptions& options, std::shared_ptr<void> owner = nullptr);

// An engine on a decoder; `ops` and `decoder` must outlive it, for example as part of `owner`. Throws Error when the memory does not hold
// one page, or an option makes no sense.
std::unique_ptr<Engine> make_engine(Ops& ops, const Decoder& decoder, const EngineOptions& options, const std::string& name = "model",
                                    std::shared_ptr<void> owner = nullptr);
// What the engine above gives its model: how many pages, which context, which number format.
DecoderModelOptions decoder_model_options(Ops& ops, const Decoder& decoder, const EngineOptions& options);

// The numbers of the KV cache for a --kv-cache-dtype: auto is what the device computes with. Throws Error for an unknown one.
KvFormat kv_format_of(std::string_view dtype, const Ops& ops);

// An engine on make_stub_model, for tests of servers without weights. The limits are those of `options`.
std::unique_ptr<Engine> make_stub_engine(const EngineOptions& options, StubOptions stub = {});

}  // namespace cachalot
