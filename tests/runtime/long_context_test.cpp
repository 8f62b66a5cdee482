// A trained model over its whole context: the error between chunked and one-shot runs must stay flat over the position, also where the
// context is exactly full and across page borders.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/mapped_file.h"
#include "cpu/cpu_ops.h"
#include "runtime/runner.h"
#include "support/golden.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

class LongContext : public testing::TestWithParam<std::string> {};

TEST_P(LongContext, ChunkedEqualsOneShotAtEveryPosition) {
  TestModel model = load_model(testdata(GetParam()), make_cpu_ops({.bf16_prompts = false}), /*exact_derived=*/true);
  const int n = model.config.max_positions, vocab = model.config.vocab;
  ASSERT_EQ(n, 2048);
  std::vector<int> ids(static_cast<size_t>(n));
  const std::string text = read_text_file(testdata("text/books/eval.txt"));
  for (size_t i = 0; i < ids.size(); ++i)
    ids[i] = 2 + (static_cast<unsigned char>(text[i]) * 31 + static_cast<unsigned char>(text[i + 1])) % (vocab - 2);
  const std::vector<float> whole = run_logits(model, ids, {.block_tokens = 64});
  const std::vector<float> chunked = run_logits(model, ids, {.chunk = 61, .block_tokens = 16});
  const std::vector<float> absorbed =
      run_logits(model, ids, {.chunk = 509, .block_tokens = 32, .form = static_cast<int>(MlaForm::absorbed)});
  const float largest = max_abs(whole);
  const auto row_error = [&](int position) {
    float error = 0;
    const size_t begin = static_cast<size_t>(position) * static_cast<size_t>(vocab);
    for (size_t i = begin; i < begin + static_cast<size_t>(vocab); ++i)
      error = std::max({error, std::abs(whole[i] - chunked[i]), std::abs(whole[i] - absorbed[i])});
    return error;
  };
  // Two experts with nearly equal scores may change places between two orders of summation; that moves single rows, here at most one in a
  // hundred.
  for (int begin = 0; begin < n; begin += 256) {
    int n_far = 0;
    for (int p = begin; p < begin + 256; ++p) n_far += row_error(p) > 1e-4f * largest;
    EXPECT_LE(n_far, 2) << "positions from " << begin;
  }
}

INSTANTIATE_TEST_SUITE_P(Trained, LongContext, testing::Values("tiny-v2", "tiny-v3"),
                         [](const auto& param) { return param.param == "tiny-v2" ? "v2" : "v3"; });

}  // namespace
}  // namespace cachalot::test
