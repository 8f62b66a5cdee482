// Turns and needles on the trained tiny model, and what they refuse.
#include "eval/turns.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cpu/cpu_ops.h"
#include "eval/needle.h"
#include "support/golden.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

using testing::Each;
using testing::Field;
using testing::HasSubstr;
using testing::SizeIs;

struct Tiny {
  std::unique_ptr<Checkpoint> checkpoint = Checkpoint::open(testdata("tiny-v2"));
  Tokenizer tokenizer = Tokenizer::from_json(checkpoint->tokenizer_json(), "tokenizer.json", {});
  TestModel model = load_model(testdata("tiny-v2"), make_cpu_ops({.n_threads = 2, .bf16_prompts = false}));
  [[nodiscard]] ModelOnOps on_ops() const { return {*model.ops, model.decoder}; }

  [[nodiscard]] TurnsPlan plan(int answer_tokens, int max_tokens) const {
    TurnsPlan plan{.questions = {"What is a court?", "And a judge?", "Why?"}, .answer_tokens = answer_tokens, .max_tokens = max_tokens};
    plan.prompt = [this](std::span<const std::string> questions, std::span<const std::string> answers) {
      std::string text;
      for (size_t i = 0; i < questions.size(); ++i) text += questions[i] + "\n" + (i < answers.size() ? answers[i] + "\n" : "");
      return tokenizer.encode(text);
    };
    plan.text = [this](std::span<const int> ids) { return tokenizer.decode(ids); };
    return plan;
  }
};

TEST(Turns, OfAModelAgainstItselfAgree) {
  const Tiny tiny;
  const TurnsPlan plan = tiny.plan(12, 200);
  const auto turns = divergence_over_turns(tiny.on_ops(), tiny.on_ops(), plan);
  ASSERT_THAT(turns, SizeIs(3));
  std::vector<std::string> answers;
  for (size_t i = 0; i < turns.size(); ++i) {
    // The context is what was said before, and the answer what the model itself goes on with.
    const std::vector<int> prompt = plan.prompt(std::span(plan.questions).first(i + 1), answers);
    EXPECT_EQ(turns[i].context, static_cast<int>(prompt.size()));
    SequenceRunner runner(*tiny.model.ops, tiny.model.decoder, 200);
    answers.push_back(tiny.tokenizer.decode(runner.greedy(prompt, 12, {})));
    EXPECT_EQ(turns[i].answer, answers.back());
    const Divergence d = turns[i].meter.result();
    EXPECT_EQ(d.tokens, 12);
    EXPECT_EQ(turns[i].same_tokens, 12);
    EXPECT_LT(d.kl_max, 1e-5);
    EXPECT_EQ(d.top1, 1.0);
  }
}

TEST(Turns, StopWhereTheContextEnds) {
  const Tiny tiny;
  const auto two = divergence_over_turns(tiny.on_ops(), tiny.on_ops(), tiny.plan(12, 40));
  EXPECT_GE(two.size(), 1u);
  EXPECT_LT(two.size(), 3u);
  EXPECT_THAT(error_of([&] { (void)divergence_over_turns(tiny.on_ops(), tiny.on_ops(), tiny.plan(12, 14)); }),
              HasSubstr("the first question takes"));
  TurnsPlan mute = tiny.plan(12, 200);
  for (int id = 0; id < tiny.model.config.vocab; ++id) mute.end_ids.push_back(id);
  const auto none = divergence_over_turns(tiny.on_ops(), tiny.on_ops(), mute);
  ASSERT_THAT(none, SizeIs(3));
  EXPECT_EQ(none[0].meter.result().tokens, 0);
}

constexpr const char* kHay = "The bridge is old. Nobody knows who built it. Boats pass below. ";

TEST(Needle, IsFoundBecauseItIsThere) {
  const Tiny tiny;
  const NeedleOptions options{.lengths = {96, 160}, .depths = {0.0, 0.5, 1.0}, .trials = 3, .distractors = 3, .bos_id = 0};
  const auto cells = find_needles(tiny.on_ops(), tiny.tokenizer, kHay, options);
  ASSERT_THAT(cells, SizeIs(6));
  EXPECT_EQ(cells[1].length, 96);
  EXPECT_EQ(cells[1].depth, 0.5);
  EXPECT_EQ(cells[3].length, 160);
  double margin = 0.0;
  int first = 0;
  for (const NeedleCell& c : cells) {
    margin += c.margin;
    first += c.first;
    EXPECT_LE(c.recalled, c.first);
  }
  // By chance a quarter would be first, and the margin below zero.
  EXPECT_GT(first, 12);
  EXPECT_GT(margin, 0.0);
  const auto again = find_needles(tiny.on_ops(), tiny.tokenizer, kHay, options);
  for (size_t i = 0; i < cells.size(); ++i) EXPECT_EQ(cells[i].log_p, again[i].log_p);
}

TEST(Needle, RefusesTooLittleRoomAndNoText) {
  const Tiny tiny;
  EXPECT_THAT(error_of([&] { (void)find_needles(tiny.on_ops(), tiny.tokenizer, kHay, {.lengths = {32}}); }), HasSubstr("has no room"));
  EXPECT_THAT(error_of([&] { (void)find_needles(tiny.on_ops(), tiny.tokenizer, "", {}); }), HasSubstr("is empty"));
  EXPECT_THAT(error_of([&] { (void)find_needles(tiny.on_ops(), tiny.tokenizer, kHay, {.lengths = {1 << 20}}); }),
              HasSubstr("but the model runs at most"));
}

}  // namespace
}  // namespace cachalot::test
