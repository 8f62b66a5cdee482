// The conversation in the terminal.
#pragma once

#include <string>

#include "cli/answer.h"
#include "cli/load_model.h"
#include "runtime/generator.h"
#include "text/chat_template.h"

namespace cachalot {

struct ChatSettings {
  std::string system;  // first message; empty: none
  SamplingOptions sampling;
  int max_tokens = -1;
  bool ignore_eos = false;
  AnswerOptions answer;
  bool show_speed = false;  // after each answer
};

// Reads messages until /exit, end of input, or Ctrl-C twice at the prompt; returns the exit code. The cached rows of the conversation so
// far are used again for each answer.
int run_chat(const LoadedModel& model, const ChatTemplate& chat_template, Generator& generator, const ChatSettings& settings);

}  // namespace cachalot
