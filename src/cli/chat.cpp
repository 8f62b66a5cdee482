// Chat: the loop of messages and answers, and its slash commands.
#include "cli/chat.h"

#include <fmt/format.h>

#include <cstdio>

#include "base/error.h"
#include "cli/commands.h"
#include "cli/line_reader.h"
#include "cli/process.h"
#include "cli/read_file.h"
#include "cli/text_units.h"
#include "text/chat_prompt.h"

namespace cachalot {
namespace {

constexpr const char* kHelp =
    "  /reset   forget the conversation\n"
    "  /stats   tokens, speed and memory so far\n"
    "  /help    this list\n"
    "  /exit    leave (also Ctrl-D, or Ctrl-C twice)\n"
    "  A line that ends with \\ goes on in the next one; \"\"\" begins and ends a message of several lines.\n"
    "  Ctrl-C ends an answer.\n";

class Chat {
 public:
  Chat(const LoadedModel& model, const ChatTemplate& chat_template, Engine& engine, const ChatSettings& settings)
      : model_(model), template_(chat_template), engine_(engine), settings_(settings) {
    reset();
  }

  int run();

 private:
  void reset();
  // False: leave.
  bool command(const std::string& text);
  void answer(const std::string& message);
  void print_stats() const;

  const LoadedModel& model_;
  const ChatTemplate& template_;
  Engine& engine_;
  const ChatSettings& settings_;
  nlohmann::ordered_json messages_;
  AnswerTimes last_, total_;
  int n_answers_ = 0, context_tokens_ = 0;
};

void Chat::reset() {
  messages_ = nlohmann::ordered_json::array();
  if (!settings_.system.empty()) messages_.push_back({{"role", "system"}, {"content", settings_.system}});
  context_tokens_ = 0;
}

bool Chat::command(const std::string& text) {
  if (text == "/exit" || text == "/quit" || text == "/bye") return false;
  if (text == "/reset" || text == "/clear") {
    reset();
    fmt::print(stderr, "The conversation is empty again.\n");
  } else if (text == "/stats") {
    print_stats();
  } else {
    if (text != "/help" && text != "/?") fmt::print(stderr, "No command {}. There are:\n", printable(text));
    fmt::print(stderr, "{}", kHelp);
  }
  return true;
}

void Chat::print_stats() const {
  fmt::print(stderr, "context {:6} of {} tokens   answers {}   KV cache {}   weights {}\n", context_tokens_, model_.max_context, n_answers_,
             bytes_text(settings_.kv_bytes), bytes_text(static_cast<double>(model_.decoder.weight_bytes())));
  if (n_answers_ == 0) return;
  fmt::print(stderr, "last answer:\n{}all answers:\n{}", describe(last_), describe(total_));
}

void Chat::answer(const std::string& message) {
  messages_.push_back({{"role", "user"}, {"content", message}});
  Answer answer;
  try {
    ChatPrompt prompt = make_chat_prompt(*model_.tokenizer, template_, messages_);
    if (prompt_opens_reasoning(prompt.text)) write_out("<think>\n");
    Request request;
    request.prompt = std::move(prompt.ids);
    request.sampling = settings_.sampling;
    request.max_tokens = settings_.max_tokens;
    request.ignore_eos = settings_.ignore_eos;
    answer = generate_answer(engine_, *model_.tokenizer, std::move(request), settings_.answer, write_out);
  } catch (const Error& error) {
    // The message is taken back, so that the conversation can go on without it.
    messages_.erase(messages_.size() - 1);
    fmt::print(stderr, "cachalot: {}\n", error.what());
    return;
  }
  write_out(answer.text.ends_with('\n') ? "" : "\n");
  messages_.push_back({{"role", "assistant"}, {"content", answer.text}});
  last_ = answer.times;
  context_tokens_ = answer.times.n_prompt + answer.times.n_generated;
  total_.n_prompt += last_.n_prompt;
  total_.n_reused += last_.n_reused;
  total_.n_generated += last_.n_generated;
  total_.first_token_s += last_.first_token_s;
  total_.decode_s += last_.decode_s;
  ++n_answers_;
  if (answer.interrupted) fmt::print(stderr, "(interrupted)\n");
  if (answer.finish == FinishReason::error) fmt::print(stderr, "cachalot: {}\n", answer.error);
  if (answer.finish == FinishReason::length && context_tokens_ >= model_.max_context)
    fmt::print(stderr, "cachalot: the context of {} tokens is full; /reset begins anew\n", model_.max_context);
  if (settings_.show_speed) fmt::print(stderr, "{}", describe(last_));
}

int Chat::run() {
  const bool terminal = stdin_is_terminal();
  if (terminal) fmt::print(stderr, "Chat with {}. /help lists commands.\n", model_.path);
  const InterruptGuard guard;
  LineReader reader;
  std::string message;
  bool warned = false;  // Ctrl-C was pressed at the prompt just now
  for (;;) {
    InterruptGuard::reset();
    if (terminal) write_out("> ");
    const LineReader::Result result = reader.read_message(message, "... ");
    if (result == LineReader::Result::end) {
      if (terminal) write_out("\n");
      return kExitOk;
    }
    if (result == LineReader::Result::interrupted) {
      write_out("\n");
      if (warned || !terminal) return kExitInterrupted;
      warned = true;
      fmt::print(stderr, "(Ctrl-C once more, or /exit, leaves)\n");
      continue;
    }
    warned = false;
    if (message.find_first_not_of(" \t\r\n") == std::string::npos) continue;
    if (message.front() == '/' && reader.was_plain_line()) {
      if (!command(message)) return kExitOk;
      continue;
    }
    answer(message);
  }
}

}  // namespace

int run_chat(const LoadedModel& model, const ChatTemplate& chat_template, Engine& engine, const ChatSettings& settings) {
  return Chat(model, chat_template, engine, settings).run();
}

}  // namespace cachalot
