// cachalot generate: answers a file of prompts, many at a time. The output may be continued: what it holds is not asked again.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <span>
#include <unordered_map>

#include "base/error.h"
#include "base/hash.h"
#include "base/json.h"
#include "cli/commands.h"
#include "cli/engine_flags.h"
#include "cli/open_engine.h"
#include "cli/process.h"
#include "cli/prompt_file.h"
#include "io/atomic_file.h"
#include "text/detokenizer.h"
#include "text/stop.h"

namespace cachalot {
namespace {

using Clock = std::chrono::steady_clock;

struct GenerateFlags {
  ModelFlags model;
  SamplingFlags sampling;
  EngineFlags engine;
  std::string input, output, priority = "P1";
  bool overwrite = false, retry_errors = false, quiet = false;
};

std::string dump(const nlohmann::ordered_json& value) {
  return value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

// By which an answer is known to belong to a line of the input.
std::string mark_of(const std::string& line) { return fmt::format("{:016x}", xxh3(std::as_bytes(std::span(line)))); }

// The output file: whole lines only. What an earlier run left is read first; half a line at its end is cut off.
class Output {
 public:
  Output(const std::string& path, const std::string& input, bool overwrite, bool retry_errors) : path_(path) {
    std::error_code ignored;
    if (std::filesystem::equivalent(path, input, ignored)) fail("{}: is the input too; expected another name for --output", path);
    if (std::filesystem::exists(path) && !overwrite) read_back(retry_errors);
    const int flags = O_WRONLY | O_CREAT | O_APPEND | (overwrite ? O_TRUNC : 0);
    file_ = ::open(path.c_str(), flags, 0644);
    if (file_ < 0) fail("{}: cannot be written: {}", path, std::strerror(errno));
  }
  ~Output() { ::close(file_); }
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  // Throws Error when it holds the answer to another prompt than this line of the input.
  [[nodiscard]] bool has(size_t index, const std::string& line) const {
    const auto found = done_.find(index);
    if (found == done_.end()) return false;
    if (!found->second.empty() && found->second != mark_of(line))
      fail("{}: answers another prompt than line {} of the input; expected another --output, or --overwrite", path_, index + 1);
    return true;
  }
  [[nodiscard]] size_t n_done() const { return done_.size(); }
  [[nodiscard]] size_t n_errors() const { return n_errors_; }
  void append(const nlohmann::ordered_json& line) {
    const std::string text = dump(line) + "\n";
    for (size_t at = 0; at < text.size();) {
      const ssize_t n = ::write(file_, text.data() + at, text.size() - at);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0)
        fail("{}: cannot be written: {}; what is there stays valid, and the same command goes on from it", path_, std::strerror(errno));
      at += static_cast<size_t>(n);
    }
  }

 private:
  void read_back(bool retry_errors) {
    std::ifstream in(path_, std::ios::binary);
    if (!in) fail("{}: cannot be read", path_);
    std::string line, kept;
    uintmax_t whole = 0;
    bool dropped = false;
    for (size_t number = 1; std::getline(in, line) && !in.eof(); ++number) {
      whole += line.size() + 1;
      const JsonDocument document = JsonDocument::parse(line, fmt::format("{}, line {}", path_, number));
      const JsonValue& root = document.root();
      const int64_t index = root.at("index").integer();
      if (index < 0) fail("{}, line {}: found index {}, expected 0 or more; is this an output of generate?", path_, number, index);
      if (retry_errors && root.find("error")) {
        dropped = true;
        continue;
      }
      kept += line + "\n";
      n_errors_ += root.find("error") ? 1 : 0;
      const auto mark = root.find("input");
      if (!done_.emplace(static_cast<size_t>(index), mark ? mark->string() : std::string_view()).second)
        fail("{}, line {}: index {} appears twice", path_, number, index);
    }
    in.close();
    if (dropped) {
      write_atomically(path_, kept);
    } else if (whole != std::filesystem::file_size(path_)) {
      std::filesystem::resize_file(path_, whole);
    }
  }

  std::string path_;
  int file_ = -1;
  std::map<size_t, std::string> done_;  // lines of the input that are answered, and their marks
  size_t n_errors_ = 0;                 // of them: with an error
};

// A request on its way: tokens to text as they come.
struct Running {
  size_t index = 0;
  std::string mark;
  nlohmann::ordered_json id;
  Detokenizer detokenizer;
  StopMatcher stops;
  std::string text;
  bool stopped = false;

  Running(size_t number, std::string mark_of_line, PromptLine& line, const Tokenizer& tokenizer)
      : index(number), mark(std::move(mark_of_line)), id(std::move(line.id)), detokenizer(tokenizer, true), stops(std::move(line.stops)) {}
  // True when a stop string is complete.
  bool push(int token) {
    const StopMatcher::Result result = stops.push(detokenizer.push(token));
    text += result.text;
    return stopped = result.stopped;
  }
  void finish() {
    if (stopped) return;
    text += stops.push(detokenizer.finish()).text;
    if (!stops.stopped()) text += stops.flush();
  }
};

class Job {
 public:
  Job(Engine& engine, const PromptDefaults& defaults, const GenerateFlags& flags, size_t n_lines)
      : engine_(engine),
        defaults_(defaults),
        flags_(flags),
        output_(flags.output, flags.input, flags.overwrite, flags.retry_errors),
        n_lines_(n_lines) {}

  int run() {
    std::ifstream in(flags_.input, std::ios::binary);
    if (!in) fail("{}: cannot be read", flags_.input);
    const InterruptGuard guard;
    std::string line;
    // As many waiting as running: the engine always finds the next one.
    const size_t most = 2 * static_cast<size_t>(engine_.info().max_requests);
    for (size_t index = 0; InterruptGuard::count() == 0 && std::getline(in, line); ++index) {
      if (line.find_first_not_of(" \t\r") == std::string::npos || output_.has(index, line)) continue;
      submit(line, index);
      while (running_.size() >= most && InterruptGuard::count() == 0) take_events();
    }
    bool cancelled = false;
    while (!running_.empty()) {
      if (InterruptGuard::count() > 0 && !cancelled) {
        for (const auto& [request, r] : running_) engine_.cancel(request);
        cancelled = true;
      }
      take_events();
    }
    report(true);
    if (InterruptGuard::count() > 0) {
      fmt::print(stderr, "interrupted; the same command goes on from here\n");
      return kExitInterrupted;
    }
    return n_errors_ + output_.n_errors() > 0 ? kExitError : kExitOk;
  }

 private:
  void submit(const std::string& line, size_t index) {
    nlohmann::ordered_json id;
    try {
      PromptLine prompt = read_prompt_line(line, index, defaults_);
      id = prompt.id;
      auto running = std::make_unique<Running>(index, mark_of(line), prompt, defaults_.tokenizer);
      // The lock is held until the request is known here: its first event may come before submit() has returned.
      const std::lock_guard lock(mutex_);
      const RequestId request = engine_.submit(std::move(prompt.request), [this](const TokenEvent& event) {
        const std::lock_guard inner(mutex_);
        events_.push_back(event);
        changed_.notify_one();
      });
      running_.emplace(request, std::move(running));
    } catch (const std::runtime_error& error) {  // Error, Refused: of this line alone
      write_error(index, id, error.what());
    }
  }

  void write_error(size_t index, const nlohmann::ordered_json& id, const std::string& message) {
    nlohmann::ordered_json out{{"index", index}};
    if (!id.is_null()) out["id"] = id;
    out["error"] = message;
    output_.append(out);
    ++n_errors_;
    ++n_finished_;
  }

  void take_events() {
    std::deque<TokenEvent> events;
    {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, std::chrono::milliseconds(50), [&] { return !events_.empty(); });
      events.swap(events_);
    }
    for (const TokenEvent& event : events) take(event);
    report(false);
  }

  void take(const TokenEvent& event) {
    const auto found = running_.find(event.request);
    if (found == running_.end()) return;
    Running& r = *found->second;
    if (event.token >= 0) ++n_tokens_;
    if (event.token >= 0 && !event.is_end_token && !r.stopped && r.push(event.token)) engine_.cancel(event.request);
    if (event.finish == FinishReason::none) return;
    r.finish();
    const FinishReason reason = r.stopped ? FinishReason::stop : event.finish;
    if (reason == FinishReason::error) {
      write_error(r.index, r.id, event.error);
    } else if (reason != FinishReason::cancelled) {  // cancelled by Ctrl-C: asked again next time
      nlohmann::ordered_json out{{"index", r.index}};
      if (!r.id.is_null()) out["id"] = r.id;
      out["input"] = r.mark;
      out["text"] = r.text;
      out["finish_reason"] = name_of(reason);
      out["usage"] = {{"prompt_tokens", event.usage.n_prompt},
                      {"cached_tokens", event.usage.n_cached},
                      {"completion_tokens", event.usage.n_output},
                      {"drafted_tokens", event.usage.n_drafted},
                      {"accepted_tokens", event.usage.n_accepted}};
      output_.append(out);
      ++n_finished_;
    }
    running_.erase(found);
  }

  // A line on a terminal twice a second, and one at the end.
  void report(bool last) {
    if (flags_.quiet) return;
    const auto now = Clock::now();
    const double elapsed = std::chrono::duration<double>(now - start_).count();
    if (!last && (::isatty(STDERR_FILENO) == 0 || now - reported_ < std::chrono::milliseconds(500))) return;
    reported_ = now;
    const double done = static_cast<double>(n_finished_), left = static_cast<double>(n_lines_ - output_.n_done()) - done;
    const std::string remaining = !last && n_finished_ > 0 ? fmt::format(", about {:.0f} s left", elapsed / done * left) : "";
    const size_t n_errors = n_errors_ + output_.n_errors();
    fmt::print(stderr, "{}{} of {} prompts, {} errors{}, {:.1f} tokens/s{}{}", ::isatty(STDERR_FILENO) != 0 ? "\r\x1b[K" : "",
               output_.n_done() + n_finished_, n_lines_, n_errors, n_errors > 0 ? " (--retry-errors asks again)" : "",
               static_cast<double>(n_tokens_) / std::max(elapsed, 1e-9), remaining, last ? "\n" : "");
  }

  Engine& engine_;
  const PromptDefaults& defaults_;
  const GenerateFlags& flags_;
  Output output_;
  size_t n_lines_;
  std::unordered_map<RequestId, std::unique_ptr<Running>> running_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<TokenEvent> events_;
  size_t n_finished_ = 0, n_errors_ = 0, n_tokens_ = 0;
  Clock::time_point start_ = Clock::now(), reported_ = start_;
};

size_t count_lines(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) fail("{}: cannot be read", path);
  size_t n = 0;
  for (std::string line; std::getline(in, line);) n += line.find_first_not_of(" \t\r") != std::string::npos ? 1 : 0;
  return n;
}

int generate(const GenerateFlags& flags) {
  const size_t n_lines = count_lines(flags.input);  // first: a wrong name should not wait for a model to load
  const auto model = std::make_shared<LoadedModel>(load_model(model_options(flags.model, flags.engine)));
  std::optional<ChatTemplate> chat_template;
  if (!model->chat_template.empty()) chat_template = ChatTemplate::parse(model->chat_template, model->chat_template_name);
  const auto engine = make_engine(model, many_requests(flags.model, flags.engine));
  SamplingFlags sampling = flags.sampling;
  if (sampling.seed < 0) sampling.seed = 0;  // a run that goes on must draw what the first would have drawn
  PromptDefaults defaults{.tokenizer = *model->tokenizer, .chat_template = chat_template ? &*chat_template : nullptr};
  defaults.sampling = sampling_options(sampling, *model);
  defaults.max_tokens = flags.sampling.max_tokens;
  defaults.ignore_eos = flags.sampling.ignore_eos;
  defaults.priority = static_cast<Priority>(flags.priority[1] - '0');
  defaults.stops = flags.sampling.stop;
  return Job(*engine, defaults, flags, n_lines).run();
}

}  // namespace

void add_generate_command(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand("generate", "Answer a file of prompts, many at a time");
  auto flags = std::make_shared<GenerateFlags>();
  command->footer(
      "The input has a JSON object a line: {\"prompt\": \"...\"} or {\"messages\": [...]}, with \"id\", \"max_tokens\", \"temperature\", "
      "\"seed\", \"stop\",\n"
      "\"priority\" and the like where a line differs; lines of OpenAI's batch files do too. The output has a line for each: index, id, "
      "input\n"
      "(a hash of the line), text, finish_reason, usage, or error. It is written as answers come; the same command goes on where an "
      "interrupted one ended. Example:\n"
      "  cachalot generate -m model.gguf --input prompts.jsonl --output answers.jsonl -n 200 --temp 0");
  add_model_flags(*command, flags->model);
  command->add_option("-i,--input", flags->input, "Prompts, JSONL")->type_name("PATH")->required()->group("Files");
  command->add_option("-o,--output", flags->output, "Answers, JSONL")->type_name("PATH")->required()->group("Files");
  command->add_flag("--overwrite", flags->overwrite, "Begin anew instead of going on")->group("Files");
  command->add_flag("--retry-errors", flags->retry_errors, "Ask lines again that ended with an error")->group("Files");
  command->add_option("--priority", flags->priority, "Class of lines that name none: P0, P1, P2")
      ->type_name("CLASS")
      ->check(CLI::IsMember({"P0", "P1", "P2"}).description(""))
      ->default_str(flags->priority)
      ->group("Engine");
  add_engine_flags(*command, flags->engine);
  add_sampling_flags(*command, flags->sampling);
  add_cache_flags(*command, flags->model);
  command->add_flag("-q,--quiet", flags->quiet, "No progress")->group("Output");
  command->callback([flags, &context] { context.action = [flags] { return generate(*flags); }; });
}

}  // namespace cachalot
