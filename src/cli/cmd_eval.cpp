// cachalot eval: perplexity of a text, and logits of given tokens.
#include <fmt/format.h>

#include <charconv>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cli/commands.h"
#include "cli/process.h"
#include "cli/read_file.h"
#include "cli/run_flags.h"
#include "eval/perplexity.h"
#include "io/safetensors.h"

namespace cachalot {
namespace {

constexpr size_t kMaxText = 1u << 30;  // bytes

struct PerplexityFlags {
  ModelFlags model;
  std::string file, method = "windows";
  int window = 512, windows = 200;
  bool json = false, quiet = false, no_bos = false;
};

int eval_perplexity(const PerplexityFlags& flags) {
  ModelOptions options = flags.model.options();
  options.max_context = flags.window;
  options.show_progress = !flags.quiet;
  const std::string text = read_input_file(flags.file, kMaxText);
  const LoadedModel model = load_model(options);
  PerplexityOptions method{.method = flags.method == "llama" ? PerplexityMethod::llama : PerplexityMethod::windows,
                           .window = flags.window,
                           .max_windows = flags.windows};
  // The windows method puts BOS before every window if the model has one; llama-perplexity's asks the tokenizer whether it adds one.
  if (!flags.no_bos && (method.method == PerplexityMethod::windows || model.tokenizer->add_bos()))
    method.bos_id = model.tokenizer->bos().value_or(model.config.bos_id);
  const bool live = !flags.quiet && stderr_is_terminal();
  if (live)
    method.progress = [](int done, int total, double ppl) { fmt::print(stderr, "\r{}/{} windows, perplexity {:.4f} ", done, total, ppl); };
  const PerplexityResult result = perplexity(*model.ops, model.decoder, model.tokenizer->encode(text), method);
  if (live) fmt::print(stderr, "\n");
  if (flags.json) {
    const nlohmann::ordered_json out{{"mean_nll", result.mean_nll},
                                     {"ppl", result.ppl},
                                     {"ppl_error", result.ppl_error},
                                     {"windows", result.windows},
                                     {"windows_available", result.windows_available},
                                     {"tokens", result.tokens},
                                     {"window", flags.window},
                                     {"method", result.method},
                                     {"model", model.path},
                                     {"file", flags.file},
                                     {"device", model.ops->name()}};
    write_out(out.dump() + "\n");
  } else {
    write_out(
        fmt::format("perplexity {:.4f} +- {:.4f}, mean negative log-likelihood {:.6f} nats over {} tokens ({} of {} windows; method: {})\n",
                    result.ppl, result.ppl_error, result.mean_nll, result.tokens, result.windows, result.windows_available, result.method));
  }
  return kExitOk;
}

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
  CLI::App* command = app.add_subcommand("eval", "Measure a model: perplexity of a text, logits of given tokens");
  command->require_subcommand(1);

  CLI::App* ppl = command->add_subcommand("ppl", "Perplexity of a text file");
  auto ppl_flags = std::make_shared<PerplexityFlags>();
  add_model_flags(*ppl, ppl_flags->model);
  ppl->add_option("-f,--file", ppl_flags->file, "Text, UTF-8")->type_name("FILE")->required();
  ppl->add_option("--method", ppl_flags->method,
                  "windows: each window alone behind BOS, all tokens scored; llama: llama-perplexity's, second half of a window scored")
      ->check(CLI::IsMember({"windows", "llama"}))
      ->type_name("NAME")
      ->default_str(ppl_flags->method);
  ppl->add_option("--window", ppl_flags->window, "Tokens of a window")
      ->type_name("N")
      ->check(number_between(2, 1 << 20))
      ->default_str("512");
  ppl->add_option("--windows", ppl_flags->windows, "Windows to score; 0: all of the text")
      ->type_name("N")
      ->check(number_between(0, 1 << 30))
      ->default_str("200");
  ppl->add_flag("--no-bos", ppl_flags->no_bos, "Run without BOS");
  ppl->add_flag("--json", ppl_flags->json, "Print one JSON object");
  ppl->add_flag("-q,--quiet", ppl_flags->quiet, "No progress");
  ppl->callback([ppl_flags, &context] { context.action = [ppl_flags] { return eval_perplexity(*ppl_flags); }; });

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
