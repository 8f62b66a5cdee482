// One turn after the other, each from its own prompt, since a chat template may change what came before.
#include "eval/turns.h"

#include "base/error.h"

namespace cachalot {

std::vector<TurnResult> divergence_over_turns(const ModelOnOps& base, const ModelOnOps& model, const TurnsPlan& plan) {
  if (base.decoder.config().vocab != model.decoder.config().vocab)
    fail("the base model has a vocabulary of {}, the model of {}", base.decoder.config().vocab, model.decoder.config().vocab);
  SequenceRunner first(base.ops, base.decoder, plan.max_tokens), second(model.ops, model.decoder, plan.max_tokens);
  std::vector<TurnResult> out;
  std::vector<std::string> answers;
  for (size_t turn = 0; turn < plan.questions.size(); ++turn) {
    const std::vector<int> prompt = plan.prompt(std::span(plan.questions).first(turn + 1), answers);
    const auto context = static_cast<int>(prompt.size());
    if (context + plan.answer_tokens > plan.max_tokens) {
      if (turn == 0)
        fail("the first question takes {} tokens and its answer {}, more than {}", context, plan.answer_tokens, plan.max_tokens);
      break;
    }
    std::vector<int> answer = first.greedy(prompt, plan.answer_tokens, plan.end_ids);
    answers.push_back(plan.text(answer));
    TurnResult result{.context = context, .question = plan.questions[turn], .answer = answers.back()};
    if (!answer.empty()) {
      ScoredWindow window{.input = prompt, .targets = prompt, .first = context - 1};
      window.input.insert(window.input.end(), answer.begin(), answer.end() - 1);
      window.targets.erase(window.targets.begin());
      window.targets.insert(window.targets.end(), answer.begin(), answer.end());
      add_divergence(first, second, window, result.meter);
      bool same = true;
      second.run(window.input, window.first, [&](int position, std::span<const float> logits) {
        same = same && argmax(logits) == window.targets[static_cast<size_t>(position)];
        result.same_tokens += same ? 1 : 0;
      });
    }
    out.push_back(std::move(result));
    if (plan.progress) plan.progress(static_cast<int>(turn) + 1, static_cast<int>(plan.questions.size()));
  }
  return out;
}

}  // namespace cachalot
