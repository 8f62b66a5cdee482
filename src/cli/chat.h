// The conversation in the terminal.
#pragma once

#include <string>

#include "cli/answer.h"
#include "cli/load_model.h"
#include "text/chat_template.h"

namespace cachalot {

struct ChatSettings {
  std::string system;  // first message; empty: none
  SamplingOptions sampling;
  int max_tokens = -1;
  bool ignore_eos = false;
  AnswerOptions answer;
  bool show_speed = false;  // after each answer
  double kv_bytes = 0.0;    // of the cache, for /stats
};

// Reads messages until /exit, end of input, or Ctrl-C twice at the prompt; returns the exit code. The engine's prefix cache gives back the
// conversation so far for each answer.
int run_chat(const LoadedModel& model, const ChatTemplate& chat_template, Engine& engine, const ChatSettings& settings);

}  // namespace cachalot
