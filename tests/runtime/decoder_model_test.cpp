// The engine on real decoders: the reference's text, secrets that stay where they belong, and text that depends on nothing but its request.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "cpu/cpu_ops.h"
#include "runtime/engine.h"
#include "support/golden.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

// Runs requests on an engine without a thread, whose clock ticks once per look.
class Harness {
 public:
  Harness(const TestModel& model, const EngineOptions& options)
      : Harness(model, decoder_model_options(*model.ops, model.decoder, options)) {}
  Harness(const TestModel& model, const DecoderModelOptions& options)
      : core_(make_decoder_model(*model.ops, model.decoder, options), {.check_invariants = true}, [this] { return clock_ += 1e-4; }) {}

  RequestId add(Request request) {
    check_request(request, core_.info());
    const RequestId id = next_++;
    core_.add(
        id, std::move(request), [this](const TokenEvent& e) { take(e); }, clock_);
    return id;
  }
  void run() {
    while (core_.has_work()) core_.step();
  }
  EngineCore& core() { return core_; }
  [[nodiscard]] const std::vector<int>& text(RequestId id) { return texts_[id]; }
  [[nodiscard]] const TokenEvent& last(RequestId id) const { return last_.at(id); }
  [[nodiscard]] const TokenEvent& first(RequestId id) const { return first_.at(id); }

 private:
  void take(const TokenEvent& e) {
    if (e.token >= 0 && !e.is_end_token) texts_[e.request].push_back(e.token);
    first_.try_emplace(e.request, e);
    last_[e.request] = e;
  }

  double clock_ = 0.0;
  RequestId next_ = 1;
  std::map<RequestId, std::vector<int>> texts_;
  std::map<RequestId, TokenEvent> first_, last_;
  EngineCore core_;
};

Request greedy(std::vector<int> prompt, int max_tokens) {
  Request request{.prompt = std::move(prompt), .max_tokens = max_tokens, .ignore_eos = true};
  request.sampling.temperature = 0;
  return request;
}

class DecoderModelTest : public testing::Test {
 protected:
  DecoderModelTest()
      : model_(load_model(testdata("golden/deepseek-v3"), make_cpu_ops({.bf16_prompts = false}))),
        golden_(read_golden(testdata("golden/deepseek-v3"))) {}
  [[nodiscard]] std::vector<int> prompt(int begin, int n) const {
    return {golden_.input_ids.begin() + begin, golden_.input_ids.begin() + begin + n};
  }

  TestModel model_;
  Golden golden_;
};

TEST_F(DecoderModelTest, GivesTheTextOfTheReference) {
  Harness engine(model_, EngineOptions{.max_context = 64});
  const RequestId id = engine.add(greedy(prompt(0, 16), 24));
  engine.run();
  EXPECT_EQ(engine.text(id), std::vector<int>(golden_.greedy.begin() + 16, golden_.greedy.begin() + 40));
  EXPECT_EQ(engine.last(id).finish, FinishReason::length);
}

TEST_F(DecoderModelTest, ConfiguredEndTokenIsHonouredUnlessIgnored) {
  TestModel model{make_cpu_ops({.bf16_prompts = false}), model_.config, {}};
  const auto checkpoint = Checkpoint::open(testdata("golden/deepseek-v3"));
  model.config.eos_ids = {7000 % golden_.vocab, golden_.greedy[18]};
  model.decoder = Decoder::load(*checkpoint, model.config, *model.ops);
  Harness engine(model, EngineOptions{.max_context = 64});
  Request request = greedy(prompt(0, 16), 8);
  const RequestId ignores = engine.add(request);
  request.ignore_eos = false;
  const RequestId honours = engine.add(request);
  engine.run();
  EXPECT_EQ(engine.text(ignores).size(), 8u);
  EXPECT_EQ(engine.text(honours).size(), 2u);
  EXPECT_EQ(engine.last(honours).finish, FinishReason::stop);
}

TEST_F(DecoderModelTest, LogprobsAreOfTheRawLogits) {
  Harness engine(model_, EngineOptions{.max_context = 64});
  Request request = greedy(prompt(0, 16), 1);
  request.sampling.n_logprobs = 3;
  request.sampling.bias = {{golden_.greedy[16], -INFINITY}};
  const RequestId id = engine.add(request);
  engine.run();
  const TokenEvent& e = engine.last(id);
  ASSERT_EQ(e.top.size(), 3u);
  EXPECT_EQ(e.top[0].token, golden_.greedy[16]);
  EXPECT_EQ(e.token, e.top[1].token);
  EXPECT_FLOAT_EQ(e.logprob, e.top[1].logprob);
}

TEST_F(DecoderModelTest, PromptScoresAreThoseOfTheReference) {
  DecoderModelOptions options = decoder_model_options(*model_.ops, model_.decoder, {.max_context = 128, .max_step_tokens = 24});
  options.max_scored_rows = 10;
  Harness engine(model_, options);
  Request request = greedy(prompt(0, 40), 1);
  request.prompt_logprobs = 1;
  engine.add(greedy(prompt(3, 20), 20));  // a neighbour
  const RequestId id = engine.add(request);
  engine.run();
  const auto& scores = engine.first(id).prompt_logprobs;
  ASSERT_EQ(scores.size(), 39u);
  for (size_t i = 0; i < scores.size(); ++i) {
    const float* row = golden_.logits.data() + i * static_cast<size_t>(golden_.vocab);
    const float* best = std::max_element(row, row + golden_.vocab);
    double sum = 0.0;
    for (int t = 0; t < golden_.vocab; ++t) sum += std::exp(static_cast<double>(row[t] - *best));
    EXPECT_EQ(scores[i][0].token, request.prompt[i + 1]);
    EXPECT_NEAR(scores[i][0].logprob, row[request.prompt[i + 1]] - *best - std::log(sum), 2e-3);
    EXPECT_NEAR(scores[i][1].logprob, -std::log(sum), 2e-3);
  }
}

TEST_F(DecoderModelTest, PagesForLessThanTheContextLowerIt) {
  const double page = 8.0 * static_cast<double>(model_.config.kv_layout(KvFormat::f32, 8).token_bytes()) * model_.config.n_layers;
  const auto options = [&](double bytes) {
    return decoder_model_options(*model_.ops, model_.decoder, {.max_context = 96, .block_tokens = 8, .kv_bytes = bytes});
  };
  EXPECT_EQ(options(0).n_blocks, 16 * 12);
  EXPECT_EQ(options(0).max_context, 96);
  EXPECT_EQ(options(page * 5.5).n_blocks, 5);
  EXPECT_EQ(options(page * 5.5).max_context, 40);
  EXPECT_NE(error_of([&] { options(page / 2); }).find("one page"), std::string::npos);
  EXPECT_NE(error_of([&] { options(1e16); }).find("the device has"), std::string::npos);
}

// 200 requests, 16 at once, on a cache that must evict: no answer may hold a run of another request's secret, and every answer must be
// that of an engine that shares nothing.
TEST_F(DecoderModelTest, SecretsStayWithTheirRequests) {
  std::mt19937 random(11);
  const auto token = [&] { return static_cast<int>(random() % static_cast<unsigned>(golden_.vocab)); };
  std::vector<std::vector<int>> prompts, secrets;
  for (int i = 0; i < 200; ++i) {
    std::vector<int> secret;
    for (int k = 0; k < 4; ++k) secret.push_back(token());
    std::vector<int> text = prompt(0, 5 + static_cast<int>(random() % 30));  // shared beginnings
    text.insert(text.end(), secret.begin(), secret.end());
    for (int k = static_cast<int>(random() % 10); k > 0; --k) text.push_back(token());
    prompts.push_back(text);
    secrets.push_back(secret);
  }
  EngineOptions shared{.max_context = 64, .max_requests = 16, .max_step_tokens = 48, .block_tokens = 8, .batch_invariant = true};
  DecoderModelOptions tight = decoder_model_options(*model_.ops, model_.decoder, shared);
  tight.n_blocks = 30;
  tight.n_host_blocks = 20;
  Harness engine(model_, tight), alone(model_, EngineOptions{.max_context = 64, .max_requests = 1, .batch_invariant = true});
  std::vector<RequestId> ids;
  for (size_t i = 0; i < prompts.size(); ++i) {
    Request request = greedy(prompts[i], 10);
    request.priority = static_cast<Priority>(i % 3);
    ids.push_back(engine.add(std::move(request)));
    engine.core().step();
  }
  engine.run();
  int n_cached = 0, n_preempted = 0;
  for (size_t i = 0; i < prompts.size(); ++i) {
    Request request = greedy(prompts[i], 10);
    request.use_prefix_cache = false;
    const RequestId id = alone.add(std::move(request));
    alone.run();
    const auto& text = engine.text(ids[i]);
    ASSERT_EQ(text, alone.text(id)) << i;
    for (size_t other = 0; other < secrets.size(); ++other)
      EXPECT_TRUE(other == i || std::search(text.begin(), text.end(), secrets[other].begin(), secrets[other].end()) == text.end());
    n_cached += engine.last(ids[i]).usage.n_cached;
    n_preempted += engine.last(ids[i]).usage.n_preempted;
  }
  EXPECT_GT(n_cached, 200);
  EXPECT_GT(n_preempted, 0);
  EXPECT_GT(engine.core().pool().n_evicted(), 100);
}

// Tokens that go from step to step on the device. The model is batch-invariant, so that surplus rows beside a text show if they matter.
TEST_F(DecoderModelTest, StepsThatFollowGiveTheTokensOfStepsOneByOne) {
  std::vector<Request> requests;
  for (int i = 0; i < 14; ++i) {
    Request request = greedy(prompt(i, 5 + 2 * i), 25);
    request.sampling.temperature = i % 3 == 0 ? 0.0f : 1.0f;
    request.sampling.top_p = 0.95f;
    request.sampling.seed = static_cast<uint64_t>(i);
    request.sampling.n_logprobs = i % 4 - 1;
    if (i % 5 == 0) request.max_tokens = 9 + i;
    requests.push_back(std::move(request));
  }
  std::vector<TokenEvent> expected;  // without followers
  std::vector<std::vector<int>> texts;
  for (const auto follow : {DecoderModelOptions::Follow::never, DecoderModelOptions::Follow::always}) {
    DecoderModelOptions options =
        decoder_model_options(*model_.ops, model_.decoder, {.max_context = 64, .max_requests = 16, .batch_invariant = true});
    options.follow = follow;
    Harness engine(model_, options);
    std::vector<RequestId> ids;
    for (const Request& request : requests) ids.push_back(engine.add(request));
    engine.run();
    for (size_t i = 0; i < ids.size(); ++i) {
      if (follow == DecoderModelOptions::Follow::never) {
        expected.push_back(engine.last(ids[i]));
        texts.push_back(engine.text(ids[i]));
        if (i % 2 == 1) requests[i].stop_tokens = {texts[i][3 + i]};  // from now on it ends there
        continue;
      }
      size_t n = 0;  // tokens until the stop token, if any
      while (n < texts[i].size() && (i % 2 == 0 || texts[i][n] != texts[i][3 + i])) ++n;
      EXPECT_EQ(engine.text(ids[i]), std::vector<int>(texts[i].begin(), texts[i].begin() + static_cast<ptrdiff_t>(n))) << i;
      const TokenEvent& last = engine.last(ids[i]);
      EXPECT_EQ(last.finish, i % 2 == 1 ? FinishReason::stop : FinishReason::length);
      if (i % 2 == 1) continue;
      EXPECT_EQ(last.logprob, expected[i].logprob);
      EXPECT_EQ(last.top.size(), expected[i].top.size());
    }
  }
}

class BatchInvariant : public testing::TestWithParam<std::string> {};

TEST_P(BatchInvariant, ARequestsTokensDependOnNothingElse) {
  const TestModel model = load_model(testdata("golden/" + GetParam()), make_cpu_ops({.bf16_prompts = false}));
  const Golden golden = read_golden(testdata("golden/" + GetParam()));
  std::mt19937 random(23);
  std::vector<Request> requests;
  for (int i = 0; i < 100; ++i) {
    Request request;
    const int n_shared = static_cast<int>(random() % 40);
    request.prompt.assign(golden.input_ids.begin(), golden.input_ids.begin() + n_shared);
    for (int k = 1 + static_cast<int>(random() % 30); k > 0; --k)
      request.prompt.push_back(static_cast<int>(random() % static_cast<unsigned>(golden.vocab)));
    request.max_tokens = 8;
    request.ignore_eos = true;
    request.sampling = {.temperature = i % 3 == 0 ? 0.0f : 1.0f, .top_p = 0.95f, .frequency = i % 5 == 0 ? 0.5f : 0.0f, .seed = random()};
    requests.push_back(std::move(request));
  }
  const auto run = [&](int batch, int step_tokens, bool cache, uint32_t order_seed) {
    EngineOptions options{
        .max_context = 80, .max_requests = batch, .max_step_tokens = step_tokens, .prefix_cache = cache, .batch_invariant = true};
    Harness engine(model, options);
    std::vector<size_t> order(requests.size());
    std::iota(order.begin(), order.end(), size_t{0});
    if (order_seed > 0) std::shuffle(order.begin(), order.end(), std::mt19937(order_seed));
    std::vector<RequestId> ids(requests.size());
    for (const size_t i : order) {
      Request request = requests[i];
      request.use_prefix_cache = cache;
      ids[i] = engine.add(std::move(request));
      if (batch == 1) engine.run();
    }
    engine.run();
    std::vector<std::vector<int>> texts;
    for (const RequestId id : ids) texts.push_back(engine.text(id));
    return texts;
  };
  const auto alone = run(1, 512, false, 0);
  EXPECT_EQ(alone.front().size(), 8u);
  EXPECT_EQ(run(1, 7, false, 0), alone) << "in chunks";
  EXPECT_EQ(run(1, 512, true, 1), alone) << "with the cache";
  for (const int batch : {2, 5, 13, 32}) {
    EXPECT_EQ(run(batch, 512, false, 0), alone) << batch;
    EXPECT_EQ(run(batch, 40, true, static_cast<uint32_t>(batch)), alone) << batch << ", shuffled, with the cache, in chunks";
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, BatchInvariant, testing::Values("deepseek-v3", "deepseek-v2-lite", "llama-gqa", "qwen3"),
                         [](const auto& param) {
                           std::string name = param.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(MlaFormChoice, FollowsTheCountOfOperations) {
  const MlaDims v3{128, 128, 64, 128, 512};
  EXPECT_FALSE(prefers_expanded(v3, 1, 4096));
  EXPECT_FALSE(prefers_expanded(v3, 170, 1 << 20));
  EXPECT_TRUE(prefers_expanded(v3, 172, 1 << 20));
  EXPECT_TRUE(prefers_expanded(v3, 8, 0));
}

}  // namespace
}  // namespace cachalot::test
