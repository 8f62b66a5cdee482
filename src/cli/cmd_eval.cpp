// cachalot eval: its subcommands, of which logits is here.
#include <fmt/format.h>

#include <charconv>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cli/cmd_eval.h"
#include "cli/read_file.h"
#include "cli/run_flags.h"
#include "eval/perplexity.h"
#include "io/safetensors.h"

namespace cachalot {
namespace {

constexpr size_t kMaxText = 1u << 30;  // bytes

struct LogitsFlags {
  ModelFlags model;
  std::string tokens, out;
  bool json = false, quiet = false;
};

std::vector<int> parse_ids(std::string_view text, const std::string& file) {
  std::vector<int> ids;
  constexpr std::string_view kBlank = " \t\r\n";
  for (size_t at = text.find_first_not_of(kBlank); at != std::string_view::npos; at = text.find_first_not_of(kBlank, at)) {
    const std::string_view word = text.substr(at, std::min(text.find_first_of(kBlank, at), text.size()) - at);
    int id = 0;
    const auto [end, problem] = std::from_chars(word.data(), word.data() + word.size(), id);
    if (problem != std::errc() || end != word.data() + word.size())
      fail("{}: found \"{}\", expected token ids separated by spaces", file, printable(word));
    ids.push_back(id);
    at += word.size();
  }
  return ids;
}

int eval_logits(const LogitsFlags& flags) {
  const std::vector<int> ids = parse_ids(read_input_file(flags.tokens, kMaxText), flags.tokens);
  ModelOptions options = flags.model.options();
  options.max_context = std::max<int>(1, static_cast<int>(ids.size()));
  options.needs_tokenizer = false;
  options.show_progress = !flags.quiet;
  const LoadedModel model = load_model(options);
  const std::vector<float> logits = sequence_logits(*model.ops, model.decoder, ids);
  write_safetensors(
      flags.out,
      {{"logits", "F32", {static_cast<int64_t>(ids.size()), model.config.vocab}, std::as_bytes(std::span<const float>(logits))}});
  if (flags.json)
    write_out(
        nlohmann::ordered_json{{"out", flags.out}, {"tokens", ids.size()}, {"vocab", model.config.vocab}, {"device", model.ops->name()}}
            .dump() +
        "\n");
  return kExitOk;
}

}  // namespace

void add_eval_command(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand("eval", "Measure a model, alone or against the one it was made of");
  command->require_subcommand(1);

  add_eval_text_commands(*command, context);
  add_eval_turns_command(*command, context);
  add_eval_needle_command(*command, context);
  add_eval_compare_command(*command, context);
  CLI::App* logits = command->add_subcommand("logits", "Logits of all positions of a token sequence");
  auto logits_flags = std::make_shared<LogitsFlags>();
  add_model_flags(*logits, logits_flags->model);
  logits->add_option("--tokens", logits_flags->tokens, "File of token ids separated by spaces")->type_name("FILE")->required();
  logits->add_option("-o,--out", logits_flags->out, "Safetensors file to write: logits f32 [n, vocab]")->type_name("FILE")->required();
  logits->add_flag("--json", logits_flags->json, "Print one JSON object");
  logits->add_flag("-q,--quiet", logits_flags->quiet, "No progress");
  logits->callback([logits_flags, &context] { context.action = [logits_flags] { return eval_logits(*logits_flags); }; });
}

}  // namespace cachalot
