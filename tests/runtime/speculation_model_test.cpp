// Speculation on the trained tiny-v3: greedy and sampled texts are those without it; guesses of its prediction layer are right often.
#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "cpu/cpu_ops.h"
#include "io/checkpoint.h"
#include "runtime/engine_core.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

struct Outcome {
  std::map<RequestId, std::vector<int>> texts;
  EngineStats stats;
};

Outcome run(CoreOptions::Speculation speculation, float temperature, int max_draft_tokens = 4) {
  const auto file = Checkpoint::open(testdata("tiny-v3"));
  const Config config = read_config(*file);
  const auto ops = make_cpu_ops({.bf16_prompts = false});
  const Decoder decoder = Decoder::load(*file, config, *ops, {.max_positions = 512, .mtp = speculation == CoreOptions::Speculation::mtp});
  DecoderModelOptions m{.name = "tiny-v3", .max_context = 256, .max_requests = 4, .max_step_tokens = 64};
  m.n_blocks = 80;
  m.form = MlaForm::absorbed;  // one form for all rows: the same bits in any chunk
  m.guesses = speculation == CoreOptions::Speculation::mtp;
  CoreOptions options;
  options.speculation = speculation;
  options.max_draft_tokens = max_draft_tokens;
  options.check_invariants = true;
  double now = 0.0;
  EngineCore core(make_decoder_model(*ops, decoder, m), options, [&] { return now += 1e-3; });
  Outcome out;
  for (int i = 0; i < 8; ++i) {
    Request request;
    for (int k = 0; k < 10 + 9 * i; ++k) request.prompt.push_back(300 + (k * (i + 3) * 37) % 700);
    request.max_tokens = 60;
    request.ignore_eos = true;
    request.sampling.temperature = temperature;
    request.sampling.seed = static_cast<uint64_t>(i);
    core.add(
        i + 1, std::move(request), [&](const TokenEvent& e) { out.texts[e.request].push_back(e.token); }, now);
  }
  while (core.has_work()) core.step();
  out.stats = core.stats();
  return out;
}

TEST(SpeculationModel, GreedyTextsStayAsTheyAre) {
  const Outcome plain = run(CoreOptions::Speculation::off, 0.0f);
  ASSERT_EQ(plain.texts.size(), 8u);
  for (const auto kind : {CoreOptions::Speculation::ngram, CoreOptions::Speculation::mtp}) {
    const Outcome guessed = run(kind, 0.0f);
    EXPECT_EQ(plain.texts, guessed.texts);
    EXPECT_GT(guessed.stats.accepted_tokens, guessed.stats.drafted_tokens / 4);
    EXPECT_LT(guessed.stats.steps, plain.stats.steps);
  }
}

// The prediction layer's own output serves it for a token further on.
TEST(SpeculationModel, SecondGuessesOfThePredictionLayerSaveSteps) {
  const Outcome one = run(CoreOptions::Speculation::mtp, 0.0f, 1), two = run(CoreOptions::Speculation::mtp, 0.0f, 2);
  EXPECT_EQ(one.texts, two.texts);
  EXPECT_LT(two.stats.steps, one.stats.steps - one.stats.steps / 20);
  // More than half of what is guessed beyond the first of each step.
  EXPECT_GT(two.stats.accepted_tokens, two.stats.drafted_tokens / 2);
}

TEST(SpeculationModel, SampledTextsStayAsTheyAre) {
  const Outcome plain = run(CoreOptions::Speculation::off, 0.7f), guessed = run(CoreOptions::Speculation::mtp, 0.7f);
  EXPECT_EQ(plain.texts, guessed.texts);
  EXPECT_GT(guessed.stats.accepted_tokens, 0);
}

}  // namespace
}  // namespace cachalot::test
