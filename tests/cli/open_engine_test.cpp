// The C++ interface as its users see it: a path in, tokens out.
#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>

#include "base/error.h"
#include "cachalot/engine.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

TEST(OpenEngine, AnswersSeveralRequestsAtOnce) {
  const auto engine = open_engine(testdata("tiny-v3"), {.n_threads = 2, .max_context = 256, .max_requests = 3, .batch_invariant = true});
  EXPECT_EQ(engine->info().max_context, 256);
  EXPECT_EQ(engine->info().model, "tiny-v3");
  EXPECT_FALSE(engine->info().eos_ids.empty());
  std::mutex mutex;
  std::condition_variable ended;
  std::vector<std::vector<int>> texts(4);
  int n_left = 4;
  for (size_t i = 0; i < texts.size(); ++i) {
    Request request{.prompt = {10, 11, 12, 13, 14}, .max_tokens = 8, .ignore_eos = true};
    request.sampling = {.temperature = 0.0f};
    engine->submit(std::move(request), [&, i](const TokenEvent& event) {
      const std::lock_guard lock(mutex);
      texts[i].push_back(event.token);
      n_left -= event.finish != FinishReason::none;
      ended.notify_one();
    });
  }
  std::unique_lock lock(mutex);
  ended.wait(lock, [&] { return n_left == 0; });
  EXPECT_EQ(texts[0].size(), 8u);
  for (const auto& text : texts) EXPECT_EQ(text, texts[0]);
}

TEST(OpenEngine, SaysWhatIsWrong) {
  EXPECT_NE(error_of([] { open_engine("/no/such/model", {}); }).find("/no/such/model"), std::string::npos);
  EXPECT_NE(error_of([] { open_engine(testdata("tiny-v3"), {.device = "cuda", .batch_invariant = true}); }).find("batch-invariant"),
            std::string::npos);
  EXPECT_NE(error_of([] { open_engine(testdata("tiny-v3"), {.kv_cache_dtype = "f12"}); }).find("f12"), std::string::npos);
  EXPECT_NE(error_of([] { open_engine(testdata("tiny-v3"), {.speculation = "crystal ball"}); }).find("crystal ball"), std::string::npos);
}

}  // namespace
}  // namespace cachalot::test
