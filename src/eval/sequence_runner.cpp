// Chunks of one sequence.
#include "eval/sequence_runner.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace cachalot {
namespace {

constexpr size_t kLogitBytes = size_t{64} << 20;  // of one chunk
constexpr int kBlockTokens = 32, kMaxRows = 512;

int checked_tokens(const Decoder& decoder, int n) {
  if (n < 1) fail("{} tokens are to be run, expected at least 1", n);
  if (n > decoder.max_positions()) fail("{} tokens are to be run, but the model runs at most {}", n, decoder.max_positions());
  return n;
}

}  // namespace

SequenceRunner::SequenceRunner(Ops& ops, const Decoder& decoder, int n_tokens)
    : ops_(ops),
      vocab_(decoder.config().vocab),
      max_tokens_(checked_tokens(decoder, n_tokens)),
      chunk_(std::clamp(static_cast<int>(kLogitBytes / (static_cast<size_t>(vocab_) * sizeof(float))), 1, std::min(kMaxRows, n_tokens))),
      cache_(ops, decoder.config(), ops.activation() == DType::bf16 ? KvFormat::bf16 : KvFormat::f32, kBlockTokens,
             (n_tokens + kBlockTokens - 1) / kBlockTokens),
      runner_(ops, decoder, cache_,
              {.max_tokens = std::min(kMaxRows, n_tokens), .max_seqs = 1, .max_logits = chunk_, .max_sequence = n_tokens}),
      rows_(static_cast<size_t>(chunk_) * static_cast<size_t>(vocab_)) {}

void SequenceRunner::check_id(int token, size_t at) const {
  if (token < 0 || token >= vocab_) fail("token {} of the input is id {}, expected 0 to {}", at, token, vocab_ - 1);
}

void SequenceRunner::start(std::span<const int> tokens, int first_wanted) {
  if (tokens.empty()) fail("no tokens were given");
  if (static_cast<int>(tokens.size()) > max_tokens_)
    fail("{} tokens were given, but at most {} were asked for", tokens.size(), max_tokens_);
  for (size_t i = 0; i < tokens.size(); ++i) check_id(tokens[i], i);
  const auto limit = std::min({tokens.size(), static_cast<size_t>(sequence_.n_computed), static_cast<size_t>(first_wanted)});
  const auto same = std::mismatch(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(limit), sequence_.tokens.begin()).first;
  cache_.truncate(sequence_, static_cast<int>(same - tokens.begin()));
  sequence_.tokens.assign(tokens.begin(), tokens.end());
  first_wanted_ = first_wanted;
}

void SequenceRunner::append(int token) {
  check_id(token, sequence_.tokens.size());
  if (sequence_.n_tokens() >= max_tokens_) fail("more than {} tokens", max_tokens_);
  sequence_.tokens.push_back(token);
}

SequenceRunner::Chunk SequenceRunner::next() {
  CACHALOT_CHECK(cache_.reserve(sequence_, sequence_.n_tokens()));
  while (sequence_.n_computed < sequence_.n_tokens()) {
    const int begin = sequence_.n_computed, end = sequence_.n_tokens();
    const bool wanted = begin >= first_wanted_;
    const int n = wanted ? std::min(chunk_, end - begin) : std::min({runner_.limits().max_tokens, first_wanted_ - begin, end - begin});
    const StepItem item{&sequence_, n, wanted ? WantLogits::all : WantLogits::none};
    const StepResult result = runner_.step({&item, 1});
    if (!wanted) continue;
    const size_t size = static_cast<size_t>(n) * static_cast<size_t>(vocab_);
    ops_.download(rows_.data(), result.logits.data, size * sizeof(float));
    return {begin, n, std::span<const float>(rows_).first(size)};
  }
  return {};
}

std::vector<int> SequenceRunner::greedy(std::span<const int> prompt, int n, std::span<const int> end_ids) {
  std::vector<int> out;
  start(prompt, static_cast<int>(prompt.size()) - 1);
  while (static_cast<int>(out.size()) < n) {
    const Chunk chunk = next();
    const int token = argmax(chunk.row(chunk.n - 1));
    if (std::find(end_ids.begin(), end_ids.end(), token) != end_ids.end()) break;
    out.push_back(token);
    if (static_cast<int>(out.size()) < n) append(token);
  }
  return out;
}

int argmax(std::span<const float> logits) { return static_cast<int>(std::max_element(logits.begin(), logits.end()) - logits.begin()); }

double log_sum_exp(std::span<const float> logits) {
  const float largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;  // of f32 exponentials: each is right to 1e-7 of itself, and so is their sum
  for (const float l : logits) sum += static_cast<double>(std::exp(l - largest));
  return std::log(sum) + static_cast<double>(largest);
}

}  // namespace cachalot
