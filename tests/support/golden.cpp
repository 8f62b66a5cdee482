// Reading golden checkpoints and running models for tests.
#include "support/golden.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "io/safetensors.h"
#include "runtime/engine.h"
#include "runtime/runner.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

template <typename T>
std::vector<T> values_of(const SafetensorsFile& file, const std::string& name) {
  const TensorInfo* tensor = file.find(name);
  CACHALOT_CHECK(tensor != nullptr, "{}", name);
  std::vector<T> out(tensor->data.size() / sizeof(T));
  std::memcpy(out.data(), tensor->data.data(), tensor->data.size());
  return out;
}

}  // namespace

Golden read_golden(const std::filesystem::path& folder) {
  const auto file = SafetensorsFile::open(folder / "golden.safetensors");
  Golden g;
  g.input_ids = values_of<int>(*file, "input_ids");
  g.logits = values_of<float>(*file, "logits");
  g.hidden = values_of<float>(*file, "hidden");
  g.greedy = values_of<int>(*file, "greedy");
  const auto& shape = file->find("hidden")->shape;
  g.n_hidden = static_cast<int>(shape[0]);
  g.n_tokens = static_cast<int>(shape[1]);
  g.hidden_size = static_cast<int>(shape[2]);
  g.vocab = static_cast<int>(g.logits.size()) / g.n_tokens;
  return g;
}

const std::vector<std::string>& golden_models() {
  static const std::vector<std::string> names = {"llama-gqa",  "llama-mha",        "llama3-rope", "qwen2",
                                                 "qwen3",      "deepseek-v2-lite", "deepseek-v2", "deepseek-v2-norope-scaling",
                                                 "deepseek-v3"};
  return names;
}

TestModel load_model(const std::filesystem::path& path, std::unique_ptr<Ops> ops, bool exact_derived) {
  const auto checkpoint = Checkpoint::open(path);
  TestModel model;
  model.config = read_config(*checkpoint);
  model.ops = std::move(ops);
  model.decoder = Decoder::load(*checkpoint, model.config, *model.ops, {.exact_derived = exact_derived});
  return model;
}

TestModel load_model(const std::filesystem::path& path, std::unique_ptr<HybridOps> ops, int n_host_experts) {
  const auto checkpoint = Checkpoint::open(path);
  HybridOps& hybrid = *ops;
  TestModel model{std::move(ops), read_config(*checkpoint), {}};
  LoadOptions load{.n_host_experts = n_host_experts};
  load.pack_on_host = [&](std::span<const LinearSource> sources) { return hybrid.pack_on_host(sources); };
  model.decoder = Decoder::load(*checkpoint, model.config, hybrid, load);
  return model;
}

std::vector<float> run_logits(TestModel& model, const std::vector<int>& ids, const RunOptions& options) {
  const int n = static_cast<int>(ids.size()), vocab = model.config.vocab, chunk = std::min(options.chunk, n);
  KvCache cache(*model.ops, model.config, options.kv_format, options.block_tokens,
                (n + options.block_tokens - 1) / options.block_tokens + 1);
  Runner runner(*model.ops, model.decoder, cache, {.max_tokens = chunk, .max_seqs = 1, .max_logits = chunk, .max_sequence = n},
                static_cast<MlaForm>(options.form));
  Sequence sequence{ids};
  std::vector<float> out(static_cast<size_t>(n) * static_cast<size_t>(vocab));
  CACHALOT_CHECK(cache.reserve(sequence, n));
  while (sequence.n_computed < n) {
    const int begin = sequence.n_computed, n_new = std::min(chunk, n - begin);
    const StepItem item{&sequence, n_new, WantLogits::all};
    const StepResult result = runner.step({&item, 1});
    model.ops->download(out.data() + static_cast<size_t>(begin) * static_cast<size_t>(vocab), result.logits.data,
                        static_cast<size_t>(n_new) * static_cast<size_t>(vocab) * sizeof(float));
  }
  return out;
}

std::vector<std::vector<int>> greedy_texts(const TestModel& model, const std::vector<std::vector<int>>& prompts, int n,
                                           const EngineOptions& options) {
  double clock = 0.0;
  EngineCore core(make_decoder_model(*model.ops, model.decoder, decoder_model_options(*model.ops, model.decoder, options)),
                  {.check_invariants = true}, [&] { return clock += 1e-3; });
  std::vector<std::vector<int>> texts = prompts;
  for (size_t i = 0; i < prompts.size(); ++i) {
    Request request{.prompt = prompts[i], .max_tokens = n, .ignore_eos = true};
    request.sampling.temperature = 0;
    core.add(
        static_cast<RequestId>(i), std::move(request),
        [&](const TokenEvent& e) { texts[static_cast<size_t>(e.request)].push_back(e.token); }, 0.0);
  }
  while (core.has_work()) core.step();
  return texts;
}

float max_abs(const std::vector<float>& values) {
  float m = 0;
  for (const float v : values) m = std::max(m, std::abs(v));
  return m;
}
float max_abs_difference(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return INFINITY;
  float m = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const float d = std::abs(a[i] - b[i]);
    if (!(d <= m)) m = d;  // a NaN sticks
  }
  return m;
}

}  // namespace cachalot::test
