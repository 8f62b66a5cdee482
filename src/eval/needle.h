// Needle in a haystack (Kamradt 2023): a fact is put somewhere into a long text, and the model is asked for it at the end. Besides exact
// recall, the right answer is held against wrong ones of the same form, so that a small model gives a signal as well.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "eval/kl.h"
#include "text/tokenizer.h"

namespace cachalot {

struct NeedleOptions {
  std::vector<int> lengths{512, 1024};                    // tokens of text, needle, question and answer
  std::vector<double> depths{0.0, 0.25, 0.5, 0.75, 1.0};  // where the needle is: 0 at the beginning, 1 at the end
  int trials = 4;                                         // needles of each length and depth
  int distractors = 7;                                    // wrong answers that each right one is held against
  uint64_t seed = 1;
  int bos_id = -1;
  std::function<void(int done, int total)> progress;  // cells
};

struct NeedleCell {
  int length = 0;
  double depth = 0.0;
  int trials = 0;
  int recalled = 0;     // trials in which each token of the answer was the most likely one
  int first = 0;        // trials in which the right answer was more likely than every wrong one
  double log_p = 0.0;   // mean log-probability of the right answer, nats
  double margin = 0.0;  // mean of that minus the most likely wrong answer's
};

// `haystack`: text to hide needles in, repeated when it is short. Cells by length, then depth; equal options give equal needles whatever
// the model. Throws Error when the text is empty, or a length has no room for needle and question.
std::vector<NeedleCell> find_needles(const ModelOnOps& model, const Tokenizer& tokenizer, const std::string& haystack,
                                     const NeedleOptions& options);

}  // namespace cachalot
