// Passes the events of one request from the engine's thread to this one.
#include "cli/answer.h"

#include <fmt/format.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>

#include "base/error.h"
#include "cli/process.h"
#include "cli/text_units.h"
#include "text/detokenizer.h"
#include "text/stop.h"

namespace cachalot {
namespace {

using Clock = std::chrono::steady_clock;

double seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

constexpr auto kInterruptLatency = std::chrono::milliseconds(50);

// Filled by the engine's thread.
class EventQueue {
 public:
  void push(const TokenEvent& event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(event);
    changed_.notify_one();
  }
  // Nothing when none came in that time.
  std::optional<TokenEvent> pop(std::chrono::milliseconds patience) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, patience, [&] { return !events_.empty(); })) return std::nullopt;
    TokenEvent event = std::move(events_.front());
    events_.pop_front();
    return event;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<TokenEvent> events_;
};

// Tokens to text: detokenizer, then stop strings.
class TextStream {
 public:
  TextStream(const Tokenizer& tokenizer, const AnswerOptions& options, Answer& answer, const std::function<void(std::string_view)>& on_text)
      : detokenizer_(tokenizer, !options.show_special), stops_(options.stops), answer_(answer), on_text_(on_text) {}

  // True when a stop string is complete.
  bool push(int id) { return feed(detokenizer_.push(id)); }
  void finish() {
    if (!stops_.stopped() && !feed(detokenizer_.finish())) emit(stops_.flush());
  }

 private:
  bool feed(const std::string& piece) {
    const StopMatcher::Result result = stops_.push(piece);
    emit(result.text);
    if (result.stopped) answer_.stop_string = stops_.matched();
    return result.stopped;
  }
  void emit(const std::string& text) {
    if (text.empty()) return;
    answer_.text += text;
    on_text_(text);
  }

  Detokenizer detokenizer_;
  StopMatcher stops_;
  Answer& answer_;
  const std::function<void(std::string_view)>& on_text_;
};

}  // namespace

double AnswerTimes::prompt_per_second() const { return first_token_s > 0.0 ? (n_prompt - n_reused) / first_token_s : 0.0; }
double AnswerTimes::decode_per_second() const { return n_generated > 1 && decode_s > 0.0 ? (n_generated - 1) / decode_s : 0.0; }

Answer generate_answer(Engine& engine, const Tokenizer& tokenizer, Request request, const AnswerOptions& options,
                       const std::function<void(std::string_view)>& on_text) {
  Answer answer;
  answer.times.n_prompt = static_cast<int>(request.prompt.size());
  const bool keep_draws = request.sampling.n_logprobs >= 0;
  TextStream stream(tokenizer, options, answer, on_text);

  const auto start = Clock::now();
  auto first = start, last = start;
  EventQueue events;
  RequestId id = 0;
  try {
    id = engine.submit(std::move(request), [&events](const TokenEvent& event) { events.push(event); });
  } catch (const Refused& refused) {
    fail("{}", refused.what());
  }
  for (bool cancelled = false;;) {
    const auto event = events.pop(kInterruptLatency);
    if (InterruptGuard::count() > 0 && !cancelled) {
      answer.interrupted = cancelled = true;
      engine.cancel(id);
    }
    if (!event) continue;
    if (event->token >= 0 && !cancelled) {
      last = Clock::now();
      if (answer.times.n_generated++ == 0) first = last;
      if (!event->is_end_token) {
        answer.ids.push_back(event->token);
        if (keep_draws) answer.draws.push_back(*event);
        if (stream.push(event->token)) {
          answer.finish = FinishReason::stop;
          cancelled = true;
          engine.cancel(id);
        }
      }
    }
    if (event->finish == FinishReason::none) continue;
    if (answer.finish == FinishReason::none) answer.finish = event->finish;
    answer.error = event->error;
    answer.times.n_reused = event->usage.n_cached;
    break;
  }
  stream.finish();
  answer.times.first_token_s = seconds(first - start);
  answer.times.decode_s = seconds(last - first);
  return answer;
}

std::string describe(const AnswerTimes& t) {
  const std::string reused = t.n_reused > 0 ? fmt::format(" ({} from the cache)", t.n_reused) : "";
  return fmt::format(
      "prompt  {:6} tokens{}  {:8.1f} tokens/s   first token after {}\n"
      "decode  {:6} tokens  {:8.1f} tokens/s   peak memory {}\n",
      t.n_prompt, reused, t.prompt_per_second(), seconds_text(t.first_token_s), t.n_generated, t.decode_per_second(),
      bytes_text(static_cast<double>(peak_memory_bytes())));
}

}  // namespace cachalot
