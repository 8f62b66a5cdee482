// A golden model as another program would hand it over: quantized, and written in one of the file formats.
#pragma once

#include "cpu/cpu_ops.h"
#include "quant/gguf_sink.h"
#include "quant/hf_sink.h"
#include "support/golden.h"
#include "support/support.h"

namespace cachalot::test {

// A sink in front of another that breaks off before a layer.
class BreaksAt final : public QuantizeSink {
 public:
  explicit BreaksAt(int layer) : layer_(layer) {}
  void start(const Config&, const std::vector<PlannedMatrix>&) override {}
  void globals(const Checkpoint&) override {}
  void layer(int layer, const Checkpoint&) override {
    if (layer == layer_) fail("broken off");
  }
  void finish() override {}

 private:
  int layer_;
};

// One run of quantize over a golden model. Change the members, then go().
struct Writing {
  Writing(const std::string& name, FileFormat file_format, const char* type, Method method = Method::rtn)
      : model(testdata("golden/" + name)), format(file_format) {
    recipe.method = method;
    recipe.scheme = *scheme_of_name(type);
    recipe.importance = false;
    recipe.meet_earlier_errors = false;
  }

  std::filesystem::path model;
  FileFormat format;
  Recipe recipe;
  uint64_t shard_bytes = uint64_t{1} << 30;
  std::unique_ptr<Checkpoint> original = Checkpoint::open(model);
  Config config = read_config(*original);
  std::unique_ptr<Ops> ops = make_cpu_ops({.n_threads = 2, .bf16_prompts = false});
  ThreadPool pool{2};
  std::unique_ptr<LayerQuantizer> quantizer;
  std::vector<std::string> notes;
  QuantizeReport report;

  void go(const std::filesystem::path& out, PartialRun::Start start = PartialRun::Start::fresh, int break_at = -1) {
    if (format == FileFormat::gguf)
      recipe.split_kv_b = config.mla;
    else
      notes = fit_recipe(format, config, *original, recipe);
    quantizer = std::make_unique<LayerQuantizer>(*original, config, *ops, pool, recipe, 32);
    PartialRun run(out, {{"--method", name_of(recipe.method)}, {"--type", name_of(recipe.scheme)}}, start);
    QuantizeOptions options{.keep = true};
    options.layers_done = run.layers_done();
    options.done = run.result();
    options.saved = [&](int layers_done, const LayerResult& result) { run.save(layers_done, result); };
    HfSink folder(*original, run, {.format = format, .folded = recipe.uses_awq(), .shard_bytes = shard_bytes});
    GgufSink file(*original, out, 0, {}, &run);
    const bool gguf = format == FileFormat::gguf;
    options.written = [&]() -> const Checkpoint& { return gguf ? file.written() : folder.written(); };
    QuantizeSink& sink = gguf ? static_cast<QuantizeSink&>(file) : folder;
    BreaksAt breaks(break_at);
    const std::vector<int> ids = read_golden(model).input_ids;
    TokenStream calibration{.window = 32}, held_out{.window = 32};
    append_windows(held_out, ids, 0, 0, 0);
    if (quantizer->needs_calibration()) calibration = held_out;
    report = quantize_model(*quantizer, *original, config, *ops, recipe, calibration, held_out, {"text"}, {&breaks, &sink}, options);
  }
};

}  // namespace cachalot::test
