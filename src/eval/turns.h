// Error of a model over the turns of one conversation: the base model answers every question greedily, and at each of its tokens both
// models are asked what comes next. The conversation is the base model's in both, so an early difference does not carry over; what grows is
// the context, and with it whatever error a model makes in it.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "eval/kl.h"

namespace cachalot {

struct TurnsPlan {
  std::vector<std::string> questions;
  // Ids of the conversation so far and the next question, up to where its answer begins: one question more than answers.
  std::function<std::vector<int>(std::span<const std::string> questions, std::span<const std::string> answers)> prompt;
  std::function<std::string(std::span<const int>)> text;  // of an answer
  std::vector<int> end_ids;
  int answer_tokens = 48;  // of an answer at most
  int max_tokens = 4096;   // of the conversation
  std::function<void(int done, int total)> progress;
};

struct TurnResult {
  int context = 0;      // tokens before the answer
  int same_tokens = 0;  // of the answer, before the first that the model would have chosen otherwise
  std::string question, answer;
  DivergenceMeter meter;
};

// Turns in order; fewer than questions when the next one would not fit max_tokens. Throws Error when not even the first does.
std::vector<TurnResult> divergence_over_turns(const ModelOnOps& base, const ModelOnOps& model, const TurnsPlan& plan);

}  // namespace cachalot
