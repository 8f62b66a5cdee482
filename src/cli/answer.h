// One answer: runs a request on an engine to its end and turns tokens into text as they come.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "cachalot/engine.h"
#include "text/tokenizer.h"

namespace cachalot {

struct AnswerOptions {
  std::vector<std::string> stops;  // stop strings
  bool show_special = false;       // control tokens are part of the text
};

struct AnswerTimes {
  int n_prompt = 0;            // tokens
  int n_reused = 0;            // of them, already in the cache
  int n_generated = 0;         // tokens drawn, an end token included
  double first_token_s = 0.0;  // from the request to its first token: reading the prompt
  double decode_s = 0.0;       // from the first token to the last

  [[nodiscard]] double prompt_per_second() const;  // tokens actually read; 0 when nothing was measured
  [[nodiscard]] double decode_per_second() const;  // of the tokens after the first
};

struct Answer {
  std::string text;               // without end token and stop string
  std::vector<int> ids;           // as drawn: without end token, with those that made up a stop string
  std::vector<TokenEvent> draws;  // one per id, when logprobs were asked for
  FinishReason finish = FinishReason::none;
  std::string error;         // when finish is error
  std::string stop_string;   // the one that ended the text, if one did
  bool interrupted = false;  // Ctrl-C
  AnswerTimes times;
};

// `on_text` gets pieces of well-formed UTF-8. Ctrl-C (an InterruptGuard must exist) ends the answer after the running step. Throws Error
// for a prompt that does not fit.
Answer generate_answer(Engine& engine, const Tokenizer& tokenizer, Request request, const AnswerOptions& options,
                       const std::function<void(std::string_view)>& on_text);

// "prompt 12 tokens, 340.1 tokens/s ..." for the end of a run; two lines.
std::string describe(const AnswerTimes& times);

}  // namespace cachalot
