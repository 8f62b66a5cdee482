// The runtime on a GPU: replayed steps equal those made call by call, trained models keep their perplexity, memory is planned.
#include <map>

#include "base/json.h"
#include "base/mapped_file.h"
#include "cuda/gpu_support.h"
#include "eval/perplexity.h"
#include "runtime/engine.h"
#include "runtime/memory_plan.h"
#include "support/golden.h"
#include "support/support.h"
#include "text/tokenizer.h"

namespace cachalot::test {
namespace {

// Prompts of different lengths, then steps of one token each (the golden text's); all logits of these.
std::vector<float> decode(TestModel& model, const std::vector<int>& ids, GraphUse graphs, int n_seqs, int& n_replayed) {
  KvCache cache(*model.ops, model.config, KvFormat::bf16, 16, n_seqs * 4);
  Runner runner(*model.ops, model.decoder, cache, {.max_tokens = 64, .max_seqs = 64, .max_logits = 64, .max_sequence = 64},
                MlaForm::automatic, graphs);
  std::vector<Sequence> sequences(static_cast<size_t>(n_seqs));
  std::vector<float> out;
  for (size_t i = 0; i < sequences.size(); ++i) {
    Sequence& s = sequences[i];
    s.tokens.assign(ids.begin() + static_cast<ptrdiff_t>(i), ids.begin() + static_cast<ptrdiff_t>(i + 40));
    CACHALOT_CHECK(cache.reserve(s, 40));
    const StepItem prompt{&s, 2 + static_cast<int>(i), WantLogits::none};
    (void)runner.step({&prompt, 1});
  }
  for (int step = 0; step < 6; ++step) {
    std::vector<StepItem> items;
    for (Sequence& s : sequences) items.push_back({&s, 1, WantLogits::last});
    const StepResult result = runner.step(items);
    const size_t at = out.size(), n = static_cast<size_t>(result.logits.n_rows()) * static_cast<size_t>(model.config.vocab);
    out.resize(at + n);
    model.ops->download(out.data() + at, result.logits.data, n * sizeof(float));
  }
  EXPECT_EQ(runner.graph_problem(), "");
  n_replayed = static_cast<int>(runner.n_replayed());
  return out;
}

class CudaRunner : public testing::TestWithParam<std::string> {};

// In the mode that fails on an allocation, an upload or a wait within a step.
TEST_P(CudaRunner, ReplayedStepsEqualEagerOnes) {
  SKIP_WITHOUT_GPU();
  const auto folder = testdata("golden/" + GetParam());
  const Golden golden = read_golden(folder);
  for (const DType activation : {DType::bf16, DType::f32}) {
    TestModel model = load_model(folder, make_cuda_ops({.activation = activation, .check = true}));
    for (const int n_seqs : {1, 5, 9, 19, 33}) {
      int n_replayed = 0, none = 0;
      const auto eager = decode(model, golden.input_ids, GraphUse::padded, n_seqs, none);
      EXPECT_EQ(decode(model, golden.input_ids, GraphUse::automatic, n_seqs, n_replayed), eager) << n_seqs << " sequences";
      EXPECT_EQ(none, 0);
      EXPECT_EQ(n_replayed, 5);
      // Without padding other kernels may serve a row, so the last bits may differ.
      const auto exact = decode(model, golden.input_ids, GraphUse::off, n_seqs, none);
      EXPECT_LE(max_abs_difference(exact, eager), (activation == DType::f32 ? 1e-5f : 0.02f) * max_abs(exact)) << n_seqs << " sequences";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, CudaRunner, testing::Values("deepseek-v3", "deepseek-v2-lite", "llama-gqa"), [](const auto& param) {
  std::string name = param.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

struct Texts {
  std::map<RequestId, std::vector<TokenEvent>> events;
  EngineStats stats;
};

Texts run_engine(TestModel& model, std::span<const Request> requests, DecoderModelOptions::Follow follow) {
  DecoderModelOptions options = decoder_model_options(*model.ops, model.decoder, {.max_context = 128, .max_requests = 16});
  options.follow = follow;
  Texts out;
  double now = 0.0;
  EngineCore core(make_decoder_model(*model.ops, model.decoder, options), {.check_invariants = true}, [&] { return now += 1e-4; });
  for (const Request& request : requests)
    core.add(
        static_cast<RequestId>(&request - requests.data()), request, [&](const TokenEvent& e) { out.events[e.request].push_back(e); }, now);
  while (core.has_work()) core.step();
  out.stats = core.stats();
  return out;
}

// The same sequences are together in all steps, since none ends by a token that only the device knows yet. Replayed steps and others.
TEST(CudaEngine, StepsThatFollowGiveTheTokensOfStepsOneByOne) {
  SKIP_WITHOUT_GPU();
  for (const auto& name : {"deepseek-v3", "llama-gqa"}) {
    const auto folder = testdata(std::string("golden/") + name);
    const Golden golden = read_golden(folder);
    TestModel model = load_model(folder, make_cuda_ops({}));
    std::vector<Request> requests;
    for (int i = 0; i < 13; ++i) {
      Request request{
          .prompt = {golden.input_ids.begin(), golden.input_ids.begin() + 3 + 2 * i}, .max_tokens = 20 + 3 * i, .ignore_eos = true};
      request.sampling = {.temperature = i % 3 == 0 ? 0.0f : 0.9f, .top_p = i % 2 == 0 ? 0.9f : 1.0f, .seed = static_cast<uint64_t>(i)};
      if (i == 5) request.sampling.bias = {{golden.greedy[20], 3.0f}};
      request.sampling.n_logprobs = i % 4 - 1;
      requests.push_back(std::move(request));
    }
    // One alone, which a token ends that its followers do not know of.
    const Texts before = run_engine(model, std::span(requests).subspan(1, 1), DecoderModelOptions::Follow::never);
    std::vector<Request> stopped(1, requests[1]);
    stopped[0].stop_tokens = {before.events.at(0).at(11).token};
    for (const std::span<const Request> some : {std::span<const Request>(requests), std::span<const Request>(stopped)}) {
      const Texts alone = run_engine(model, some, DecoderModelOptions::Follow::never),
                  ahead = run_engine(model, some, DecoderModelOptions::Follow::automatic);
      ASSERT_EQ(alone.events.size(), some.size());
      EXPECT_EQ(alone.stats.output_tokens, ahead.stats.output_tokens);
      for (const auto& [id, events] : alone.events) {
        const auto& others = ahead.events.at(id);
        ASSERT_EQ(events.size(), others.size()) << name << " " << id;
        for (size_t i = 0; i < events.size(); ++i) {
          EXPECT_EQ(events[i].token, others[i].token) << name << " " << id << " at " << i;
          EXPECT_EQ(events[i].logprob, others[i].logprob);
          EXPECT_EQ(events[i].finish, others[i].finish);
          EXPECT_EQ(events[i].top.size(), others[i].top.size());
        }
      }
    }
  }
}

TEST(CudaMemoryPlan, LeavesRoomForWhatWasMeasured) {
  SKIP_WITHOUT_GPU();
  TestModel model = load_model(testdata("tiny-v3"), make_cuda_ops({}));
  const RunnerLimits limits{.max_tokens = 512, .max_seqs = 24, .max_logits = 24, .max_sequence = 2048};
  const MemorySize before = model.ops->memory();
  const MemoryPlan plan = plan_memory(*model.ops, model.decoder, limits, KvFormat::bf16, 16, 0.05);
  std::printf("%s\n", plan.text().c_str());
  EXPECT_EQ(plan.total, before.total);
  EXPECT_GT(plan.step, 0u);
  EXPECT_LT(plan.graphs, size_t{64} << 20);  // none where other programs give memory back meanwhile
  KvCache cache(*model.ops, model.config, KvFormat::bf16, 16, plan.n_blocks);
  Runner runner(*model.ops, model.decoder, cache, limits);
  runner.rehearse();
  EXPECT_GT(runner.record_graphs(), 8);
  const MemorySize after = model.ops->memory();
  EXPECT_LE(after.total - after.free, static_cast<size_t>(0.05 * static_cast<double>(after.total)) + (size_t{64} << 20));
  const std::string message = error_of([&] { (void)plan_memory(*model.ops, model.decoder, limits, KvFormat::bf16, 16, 1e-4); });
  EXPECT_NE(message.find("0 KV pages fit, expected at least 128 for one sequence of 2048 tokens"), std::string::npos) << message;
}

class CudaTrained : public testing::TestWithParam<std::tuple<std::string, std::string>> {};

// Perplexity in bf16 within 0.2% of the value measured when the models were made.
TEST_P(CudaTrained, KeepsItsPerplexity) {
  SKIP_WITHOUT_GPU();
  const auto& [name, domain] = GetParam();
  const auto folder = testdata(name);
  const JsonDocument reference = JsonDocument::parse(read_text_file(folder / "reference.json"), "reference.json");
  const JsonValue entry = reference.root().at("eval").at(domain + ".txt");
  const Tokenizer tokenizer = Tokenizer::from_json(read_text_file(folder / "tokenizer.json"), "tokenizer.json");
  TestModel model = load_model(folder, make_cuda_ops({}));
  const PerplexityResult result =
      perplexity(*model.ops, model.decoder, tokenizer.encode(read_text_file(testdata("text/" + domain + "/eval.txt"))),
                 {.max_windows = 200, .bos_id = 0});
  EXPECT_EQ(result.windows, entry.at("windows").integer());
  const double ratio = result.ppl / entry.at("ppl").number();
  std::printf("%s %s: perplexity %.4f, %.5f of the reference\n", name.c_str(), domain.c_str(), result.ppl, ratio);
  EXPECT_NEAR(ratio, 1.0, 2e-3);
}

INSTANTIATE_TEST_SUITE_P(Domains, CudaTrained,
                         testing::Combine(testing::Values("tiny-v2", "tiny-v3"), testing::Values("code", "legal", "wiki", "zh")),
                         [](const auto& param) {
                           std::string text = std::get<0>(param.param) + "_" + std::get<1>(param.param);
                           std::replace(text.begin(), text.end(), '-', '_');
                           return text;
                         });

}  // namespace
}  // namespace cachalot::test
