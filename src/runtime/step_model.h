// StepModel: what the engine runs steps on: a decoder with its KV pages, or a stand-in without weights.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/check.h"
#include "ops/sampling.h"
#include "runtime/runner.h"
#include "runtime/scheduler.h"

namespace cachalot {

struct ModelFacts {
  std::string name;  // for people
  int vocab = 0;
  std::vector<int> eos_ids;
  int max_context = 0;                  // tokens of one request; the pages hold at least one such
  int n_blocks = 0, block_tokens = 16;  // KV pages
  int n_host_blocks = 0;                // pages in host memory
  double move_seconds = 0.0;            // a page to the host and back takes about this long
  int max_requests = 1;                 // in one step
  int max_step_tokens = 512;            // rows of a step
  int max_scored_rows = 64;             // logit rows of a step beside one per request
  // begin() returns before the step is done, so that events are passed on while it runs.
  bool runs_ahead = false;
  bool follows = false;  // follow() works
};

class StepModel {
 public:
  virtual ~StepModel() = default;
  [[nodiscard]] virtual const ModelFacts& facts() const = 0;
  // Before begin().
  virtual void copy_page(const PageCopy& copy) = 0;
  // Starts a step; n_computed of each item's sequence grows by n_new.
  virtual void begin(std::span<const StepItem> items) = 0;
  // Draws a token for each logit row of the step that was started last: those of the first item, then those of the second, and so on.
  virtual void draw(std::span<const SampleParams> params) = 0;
  // Starts the step behind one whose tokens are being drawn, before they are known: each sequence goes on by one row, at n_computed, with
  // the token of that logit row (as counted by draw()). n_computed does not grow, since the token may turn out to be the text's last.
  struct Follower {
    Sequence* sequence = nullptr;
    int row = 0;
  };
  virtual void follow(std::span<const Follower> items) {
    (void)items;
    CACHALOT_CHECK(false, "this model runs one step at a time");
  }
  // Waits for the oldest step whose tokens were not taken yet.
  virtual void finish(std::span<Sampled> out) = 0;
  // Whether guess() works.
  [[nodiscard]] virtual bool guesses() const { return false; }
  // After each step, once tokens were drawn: n_valid of the item's rows belong to its text, whose next token is known up to the last of
  // them. out[i] receives guesses of the tokens behind the text's last one, n_wanted of them or fewer.
  struct GuessItem {
    int n_valid = 0, n_wanted = 0;
  };
  virtual void guess(std::span<const GuessItem> items, std::span<std::vector<int>> out) {
    (void)items;
    for (std::vector<int>& guesses : out) guesses.clear();
  }
};

struct DecoderModelOptions {
  std::string name;
  int max_context = 4096, max_requests = 16, max_step_tokens = 512, max_scored_rows = 64;
  int block_tokens = 16, n_blocks = 0, n_host_blocks = 0;
  KvFormat kv_format = KvFormat::f32;
  MlaForm form = MlaForm::automatic;
  bool guesses = false;  // with the decoder's prediction layer, which it must then have
  enum class Follow : uint8_t { automatic, always, never };
  Follow follow = Follow::automatic;  // automatic: where calls only enqueue; the others are for tests
};
inline RunnerLimits runner_limits(const DecoderModelOptions& o) {
  return {.max_tokens = o.max_step_tokens,
          .max_seqs = o.max_requests,
          .max_logits = o.max_requests + o.max_scored_rows,
          .max_sequence = o.max_context};
}
// Both arguments must outlive it.
std::unique_ptr<StepModel> make_decoder_model(Ops& ops, const Decoder& decoder, const DecoderModelOptions& options);

// A stand-in that repeats the prompt, for tests of what is around a model. A step takes as long as these numbers say, by sleeping.
struct StubOptions {
  std::string name = "stub";
  int vocab = 1024, eos_id = 1;
  int answer_tokens = -1;  // then comes the end token; -1: as many as the prompt has
  int max_context = 4096, max_requests = 16, max_step_tokens = 512, block_tokens = 16;
  int n_blocks = 0;                                                        // 0: as many as all requests can need
  bool follows = false;                                                    // as a device that runs steps by itself would
  double step_seconds = 0.0, decode_row_seconds = 0.0, row_seconds = 0.0;  // per step, per generating request, per prompt token
  std::function<void(double seconds)> sleep;                               // takes the place of sleeping
};
std::unique_ptr<StepModel> make_stub_model(StubOptions options);

}  // namespace cachalot
