// cachalot eval turns: how the error of a model grows over a chat.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <sstream>

#include "base/error.h"
#include "cli/cmd_eval.h"
#include "cli/eval_text.h"
#include "cli/load_tokenizer.h"
#include "cli/process.h"
#include "cli/read_file.h"
#include "eval/turns.h"
#include "text/chat_prompt.h"

namespace cachalot {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array<const char*, 20> kQuestions{"What is the capital of Portugal, and what is it known for?",
                                                 "Explain how a bicycle stays upright.",
                                                 "Write a short poem about the sea.",
                                                 "What is 17 times 24? Show the steps.",
                                                 "Summarise what we have talked about so far.",
                                                 "Give three reasons why people learn a second language.",
                                                 "Write a function in Python that reverses a list.",
                                                 "Now make it work on strings too.",
                                                 "What does a court mean by reasonable doubt?",
                                                 "Translate 'good morning, my friend' into German and French.",
                                                 "Which of these answers was the longest?",
                                                 "Name five fruits that start with the letter P.",
                                                 "How does a vaccine work? Keep it to three sentences.",
                                                 "Describe the taste of coffee to somebody who never had any.",
                                                 "What were the steps of the multiplication again?",
                                                 "Tell me a story about a lighthouse keeper in four sentences.",
                                                 "What could the next chapter of that story be?",
                                                 "List the planets from the sun outwards.",
                                                 "Turn the poem from before into plain prose.",
                                                 "What was my very first question?"};

struct TurnsFlags {
  ModelFlags model;
  std::string base_model, questions;
  int turns = 10, answer_tokens = 48, context = 0;
  bool json = false, quiet = false;
};

std::vector<std::string> questions_of(const TurnsFlags& flags) {
  std::vector<std::string> out;
  if (flags.questions.empty()) {
    out.assign(kQuestions.begin(), kQuestions.end());
  } else {
    std::istringstream lines(read_input_file(flags.questions, size_t{1} << 24));
    for (std::string line; std::getline(lines, line);)
      if (line.find_first_not_of(" \t\r") != std::string::npos) out.push_back(line);
    if (out.empty()) fail("{}: no questions, of which each is a line", flags.questions);
  }
  if (static_cast<int>(out.size()) < flags.turns) fail("--turns: found {}, but there are {} questions", flags.turns, out.size());
  out.resize(static_cast<size_t>(flags.turns));
  return out;
}

// Through the model's chat template, or as a plain dialogue where it has none.
std::function<std::vector<int>(std::span<const std::string>, std::span<const std::string>)> prompt_of(const LoadedModel& model) {
  const Tokenizer& tokenizer = *model.tokenizer;
  if (model.chat_template.empty()) {
    const int bos = bos_before_text(tokenizer, model.config);
    return [&tokenizer, bos](std::span<const std::string> questions, std::span<const std::string> answers) {
      std::string text;
      for (size_t i = 0; i < questions.size(); ++i)
        text += "User: " + questions[i] + "\n\nAssistant:" + (i < answers.size() ? answers[i] + "\n\n" : "");
      std::vector<int> ids = tokenizer.encode(text);
      if (bos >= 0) ids.insert(ids.begin(), bos);
      return ids;
    };
  }
  const auto parsed = std::make_shared<ChatTemplate>(ChatTemplate::parse(model.chat_template, model.chat_template_name));
  return [&tokenizer, parsed](std::span<const std::string> questions, std::span<const std::string> answers) {
    Json messages = Json::array();
    for (size_t i = 0; i < questions.size(); ++i) {
      messages.push_back({{"role", "user"}, {"content", questions[i]}});
      if (i < answers.size()) messages.push_back({{"role", "assistant"}, {"content", answers[i]}});
    }
    return make_chat_prompt(tokenizer, *parsed, messages).ids;
  };
}

int eval_turns(const TurnsFlags& flags) {
  ModelOptions options = flags.model.options();
  options.show_progress = !flags.quiet;
  options.max_context = flags.context;
  options.path = flags.base_model;
  const LoadedModel base = load_model(options);
  options.path = flags.model.model;
  options.needs_tokenizer = false;
  options.max_context = base.max_context;
  const LoadedModel model = load_model(options);

  TurnsPlan plan{
      .questions = questions_of(flags), .prompt = prompt_of(base), .answer_tokens = flags.answer_tokens, .max_tokens = base.max_context};
  plan.text = [&](std::span<const int> ids) { return base.tokenizer->decode(ids); };
  plan.end_ids = base.config.eos_ids;
  if (!flags.quiet && stderr_is_terminal()) plan.progress = [](int done, int total) { fmt::print(stderr, "\r{}/{} turns ", done, total); };
  const std::vector<TurnResult> turns = divergence_over_turns({*base.ops, base.decoder}, {*model.ops, model.decoder}, plan);
  end_progress(flags.quiet);

  Json json{{"model", model.path}, {"base_model", base.path}, {"template", base.chat_template.empty() ? "none" : base.chat_template_name}};
  std::string table =
      "| turn | context | tokens | mean KL | 99% KL | same top 1 | same before the first difference |\n"
      "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n";
  DivergenceMeter all;
  for (size_t i = 0; i < turns.size(); ++i) {
    const TurnResult& t = turns[i];
    const Divergence d = t.meter.result();
    all.merge(t.meter);
    table += fmt::format("| {} | {} | {} | {:.5f} ± {:.5f} | {:.4f} | {:.1f}% | {} |\n", i + 1, t.context, d.tokens, d.kl, d.kl_error,
                         d.kl_p99, 100.0 * d.top1, t.same_tokens);
    Json one{{"turn", i + 1}, {"context", t.context}, {"same_tokens", t.same_tokens}, {"question", t.question}, {"answer", t.answer}};
    one.update(divergence_json(d));
    json["turns"].push_back(std::move(one));
  }
  json["all"] = divergence_json(all.result());
  const Divergence d = all.result();
  table += fmt::format("| all | | {} | {:.5f} ± {:.5f} | {:.4f} | {:.1f}% | |\n", d.tokens, d.kl, d.kl_error, d.kl_p99, 100.0 * d.top1);
  const bool cut = turns.size() < plan.questions.size();
  if (cut)
    fmt::print(stderr, "note: {} of {} turns fit the context of {} tokens (-c)\n", turns.size(), plan.questions.size(), plan.max_tokens);
  write_out(flags.json
                ? json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n"
                : fmt::format("{} against {}, which answers; {}\n\n{}", model.path, base.path,
                              base.chat_template.empty() ? "no chat template: a plain dialogue" : "template: " + base.chat_template_name,
                              table));
  return kExitOk;
}

}  // namespace

void add_eval_turns_command(CLI::App& eval, Context& context) {
  CLI::App* command = eval.add_subcommand("turns", "Error of a model over the turns of a chat that the base model answers");
  auto flags = std::make_shared<TurnsFlags>();
  add_model_flags(*command, flags->model);
  command->add_option("--base-model", flags->base_model, "The model that answers, and that the other is held against")
      ->type_name("PATH")
      ->required();
  command->add_option("--questions", flags->questions, "Questions, a line each, in place of 20 built-in ones")->type_name("FILE");
  command->add_option("--turns", flags->turns, "Questions to ask")->type_name("N")->check(number_between(1, 10000))->default_str("10");
  command->add_option("--answer-tokens", flags->answer_tokens, "Tokens of an answer at most")
      ->type_name("N")
      ->check(number_between(1, 1 << 16))
      ->default_str("48");
  command->add_option("-c,--max-model-len", flags->context, "Tokens of the whole conversation; 0: 4096 or the model's limit")
      ->type_name("N")
      ->check(number_between(0, 1 << 24));
  add_output_flags(*command, flags->json, flags->quiet);
  command->callback([flags, &context] { context.action = [flags] { return eval_turns(*flags); }; });
}

}  // namespace cachalot
