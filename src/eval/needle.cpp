// Haystacks by sentences, needles by seed.
#include "eval/needle.h"

#include <algorithm>
#include <array>
#include <random>

#include "base/error.h"

namespace cachalot {
namespace {

constexpr std::array<const char*, 16> kPlaces{"Lisbon", "Oslo", "Vienna", "Prague", "Dublin", "Athens", "Berlin", "Madrid",
                                              "Paris",  "Rome", "London", "Tokyo",  "Cairo",  "Lima",   "Delhi",  "Quito"};

using Ids = std::vector<int>;

std::vector<Ids> sentences_of(const Tokenizer& tokenizer, const std::string& text) {
  std::vector<Ids> out;
  for (size_t begin = 0; begin < text.size();) {
    size_t end = text.find_first_of(".\n", begin);
    end = end == std::string::npos ? text.size() : end + 1;
    Ids ids = tokenizer.encode(text.substr(begin, end - begin));
    if (!ids.empty()) out.push_back(std::move(ids));
    begin = end;
  }
  if (out.empty()) fail("the text to hide needles in is empty");
  return out;
}

struct Question {
  Ids needle, question;
  std::vector<Ids> answers;  // the right one first, all equally many tokens
};

// A fact "The secret number of PLACE is NUMBER." and the same words again up to the number.
Question make_question(const Tokenizer& tokenizer, const NeedleOptions& options, std::mt19937_64& random) {
  const std::string fact = std::string("The secret number of ") + kPlaces[random() % kPlaces.size()] + " is";
  const auto number = [&] { return " " + std::to_string(10000 + random() % 90000); };
  const std::string right = number();
  Question out{.needle = tokenizer.encode(" " + fact + right + ". "), .question = tokenizer.encode("\n\n" + fact)};
  out.answers.push_back(tokenizer.encode(right));
  // Numbers of the same length may split differently; only those that split alike have comparable probabilities.
  for (int tries = 0; static_cast<int>(out.answers.size()) <= options.distractors && tries < 200 * options.distractors; ++tries) {
    Ids wrong = tokenizer.encode(number());
    if (wrong.size() == out.answers[0].size() && std::find(out.answers.begin(), out.answers.end(), wrong) == out.answers.end())
      out.answers.push_back(std::move(wrong));
  }
  return out;
}

Ids hide(const Question& q, const std::vector<Ids>& sentences, size_t start, int length, double depth, int bos_id) {
  const size_t fixed = q.needle.size() + q.question.size() + q.answers[0].size() + (bos_id >= 0 ? 1 : 0);
  const size_t hay = static_cast<size_t>(length) > fixed ? static_cast<size_t>(length) - fixed : 0;
  if (hay < 16) fail("a length of {} tokens has no room for a needle: its needle and question alone take {}", length, fixed);
  Ids out;
  if (bos_id >= 0) out.push_back(bos_id);
  const auto before = static_cast<size_t>(depth * static_cast<double>(hay));
  size_t used = 0;
  bool hidden = false;
  for (size_t s = start; used < hay; ++s) {
    if (!hidden && used >= before) {
      out.insert(out.end(), q.needle.begin(), q.needle.end());
      hidden = true;
    }
    const Ids& sentence = sentences[s % sentences.size()];
    const size_t n = std::min(sentence.size(), hay - used);
    out.insert(out.end(), sentence.begin(), sentence.begin() + static_cast<ptrdiff_t>(n));
    used += n;
  }
  if (!hidden) out.insert(out.end(), q.needle.begin(), q.needle.end());
  out.insert(out.end(), q.question.begin(), q.question.end());
  return out;
}

struct Scored {
  double log_p = 0.0;
  bool greedy = true;  // the most likely token at each place
};
Scored score(SequenceRunner& runner, const Ids& prompt, const Ids& answer) {
  Ids input = prompt;
  input.insert(input.end(), answer.begin(), answer.end() - 1);
  Scored out;
  const int first = static_cast<int>(prompt.size()) - 1;
  runner.run(input, first, [&](int position, std::span<const float> logits) {
    const int token = answer[static_cast<size_t>(position - first)];
    out.log_p += static_cast<double>(logits[static_cast<size_t>(token)]) - log_sum_exp(logits);
    out.greedy = out.greedy && argmax(logits) == token;
  });
  return out;
}

}  // namespace

std::vector<NeedleCell> find_needles(const ModelOnOps& model, const Tokenizer& tokenizer, const std::string& haystack,
                                     const NeedleOptions& options) {
  const std::vector<Ids> sentences = sentences_of(tokenizer, haystack);
  SequenceRunner runner(model.ops, model.decoder, *std::max_element(options.lengths.begin(), options.lengths.end()));
  std::vector<NeedleCell> out;
  const int total = static_cast<int>(options.lengths.size() * options.depths.size());
  for (const int length : options.lengths)
    for (const double depth : options.depths) {
      NeedleCell cell{.length = length, .depth = depth, .trials = options.trials};
      std::mt19937_64 random(options.seed);
      for (int t = 0; t < options.trials; ++t) {
        const Question q = make_question(tokenizer, options, random);
        const Ids prompt = hide(q, sentences, random() % sentences.size(), length, depth, options.bos_id);
        const Scored right = score(runner, prompt, q.answers[0]);
        double best_wrong = -1e300;
        for (size_t i = 1; i < q.answers.size(); ++i) best_wrong = std::max(best_wrong, score(runner, prompt, q.answers[i]).log_p);
        cell.recalled += right.greedy ? 1 : 0;
        cell.first += right.log_p > best_wrong ? 1 : 0;
        cell.log_p += right.log_p / options.trials;
        cell.margin += (right.log_p - best_wrong) / options.trials;
      }
      out.push_back(cell);
      if (options.progress) options.progress(static_cast<int>(out.size()), total);
    }
  return out;
}

}  // namespace cachalot
