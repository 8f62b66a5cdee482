// Flags, texts and tables of `eval`.
#include "cli/eval_text.h"

#include <fmt/format.h>

#include "base/error.h"
#include "cli/load_tokenizer.h"
#include "cli/process.h"
#include "cli/read_file.h"

namespace cachalot {
namespace {

constexpr size_t kMaxText = 1u << 30;  // bytes

}  // namespace

void add_text_flags(CLI::App& command, TextFlags& flags) {
  command.add_option("-f,--file", flags.file, "Text, UTF-8")->type_name("FILE");
  command.add_option("--domain", flags.domains, "Text with a name for what it is about; may be given several times")
      ->type_name("NAME=FILE")
      ->take_all();
  command
      .add_option("--method", flags.method,
                  "windows: each window alone, behind BOS if the tokenizer adds one, all tokens scored; llama: llama-perplexity's, second "
                  "half of a window scored")
      ->check(CLI::IsMember({"windows", "llama"}))
      ->type_name("NAME")
      ->default_str(flags.method);
  command.add_option("--window", flags.window, "Tokens of a window")
      ->type_name("N")
      ->check(number_between(2, 1 << 20))
      ->default_str(std::to_string(flags.window));
  command.add_option("--windows", flags.windows, "Windows of each text to score; 0: all of it")
      ->type_name("N")
      ->check(number_between(0, 1 << 30))
      ->default_str(std::to_string(flags.windows));
  command.add_flag("--no-bos", flags.no_bos, "Run without BOS");
}

void add_output_flags(CLI::App& command, bool& json, bool& quiet) {
  command.add_flag("--json", json, "Print one JSON object");
  command.add_flag("-q,--quiet", quiet, "No progress");
}

std::pair<std::string, std::string> split_flag(const std::string& text, const char* flag, const char* expected) {
  const size_t at = text.find('=');
  if (at == std::string::npos || at == 0 || at + 1 == text.size()) fail("{}: found \"{}\", expected {}", flag, printable(text), expected);
  return {text.substr(0, at), text.substr(at + 1)};
}

std::vector<DomainTokens> read_domains(const TextFlags& flags, const Tokenizer& tokenizer, const PerplexityOptions& options) {
  std::vector<DomainTokens> out;
  const auto add = [&](const std::string& domain, const std::string& file) {
    // llama-perplexity tokenizes with BOS, so that its first window begins with it and the next ones are shifted by one.
    const bool bos = options.method == PerplexityMethod::llama && options.bos_id >= 0;
    out.push_back({domain, file, tokenizer.encode(read_input_file(file, kMaxText))});
    if (bos) out.back().tokens.insert(out.back().tokens.begin(), options.bos_id);
  };
  if (!flags.file.empty()) add("text", flags.file);
  for (const std::string& domain : flags.domains) {
    const auto [name, file] = split_flag(domain, "--domain", "NAME=FILE");
    add(name, file);
  }
  if (out.empty()) fail("expected text: -f FILE, or --domain NAME=FILE");
  return out;
}

PerplexityOptions method_options(const TextFlags& flags, const LoadedModel& model) {
  PerplexityOptions options{.method = flags.method == "llama" ? PerplexityMethod::llama : PerplexityMethod::windows,
                            .window = flags.window,
                            .max_windows = flags.windows};
  if (!flags.no_bos) options.bos_id = bos_before_text(*model.tokenizer, model.config);
  return options;
}

std::function<void(int, int, double)> window_progress(bool quiet, const std::string& what) {
  if (quiet || !stderr_is_terminal()) return {};
  return [what](int done, int total, double value) { fmt::print(stderr, "\r{}/{} windows, {} {:.4f} ", done, total, what, value); };
}
void end_progress(bool quiet) {
  if (!quiet && stderr_is_terminal()) fmt::print(stderr, "\r\x1b[K");
}

nlohmann::ordered_json divergence_json(const Divergence& d) {
  using Json = nlohmann::ordered_json;
  const auto estimate = [](double value, double error) { return Json{{"value", value}, {"error", error}}; };
  const auto quantiles = [](const Quantiles& q) {
    Json out{{"minimum", q.least}};
    for (size_t i = 0; i < kQuantiles.size(); ++i) out[fmt::format("{:.1f}%", 100.0 * kQuantiles[i])] = q.at[i];
    out["maximum"] = q.most;
    return out;
  };
  return {{"tokens", d.tokens},
          {"ppl", estimate(d.ppl, d.ppl_error)},
          {"base_ppl", estimate(d.base_ppl, d.base_ppl_error)},
          {"ppl_ratio", estimate(d.ppl_ratio, d.ppl_ratio_error)},
          {"log_ppl_ratio", estimate(d.log_ratio.value, d.log_ratio.error)},
          {"ppl_difference", estimate(d.ppl_difference.value, d.ppl_difference.error)},
          {"log_ppl_correlation", d.correlation},
          {"kl", estimate(d.kl, d.kl_error)},
          {"kl_quantiles", quantiles(d.kl_quantiles)},
          {"delta_p", estimate(d.delta_p.value, d.delta_p.error)},
          {"delta_p_rms", estimate(d.delta_p_rms.value, d.delta_p_rms.error)},
          {"delta_p_quantiles", quantiles(d.delta_p_quantiles)},
          {"same_top", estimate(d.top1, d.top1_error)}};
}

std::string divergence_text(const Divergence& d) {
  std::string out = fmt::format("{} tokens\n\nPerplexity\n", d.tokens);
  const auto line = [&](const char* name, double value, double error) {
    out += fmt::format("  {:<28} {:>11.6f} ± {:.6f}\n", name, value, error);
  };
  const auto share = [&](const char* name, double value, double error) {
    out += fmt::format("  {:<28} {:>10.3f}% ± {:.3f}%\n", name, 100.0 * value, 100.0 * error);
  };
  line("PPL(Q)", d.ppl, d.ppl_error);
  line("PPL(base)", d.base_ppl, d.base_ppl_error);
  out += fmt::format("  {:<28} {:>10.2f}%\n", "Cor(ln PPL(Q), ln PPL(base))", 100.0 * d.correlation);
  line("ln(PPL(Q)/PPL(base))", d.log_ratio.value, d.log_ratio.error);
  line("PPL(Q)/PPL(base)", d.ppl_ratio, d.ppl_ratio_error);
  line("PPL(Q)-PPL(base)", d.ppl_difference.value, d.ppl_difference.error);
  out += "\nKL divergence, nats\n";
  line("mean", d.kl, d.kl_error);
  const auto quantiles = [&](const Quantiles& q, double factor, const char* unit) {
    out += fmt::format("  {:<28} {:>11.6f}{}\n", "maximum", factor * q.most, unit);
    for (size_t i = kQuantiles.size(); i-- > 0;) {
      const std::string name = kQuantiles[i] == 0.5 ? "median" : fmt::format("{:.1f}%", 100.0 * kQuantiles[i]);
      out += fmt::format("  {:<28} {:>11.6f}{}\n", name, factor * q.at[i], unit);
    }
    out += fmt::format("  {:<28} {:>11.6f}{}\n", "minimum", factor * q.least, unit);
  };
  quantiles(d.kl_quantiles, 1.0, "");
  out += "\nProbability of the text's token, Q minus base\n";
  share("mean Δp", d.delta_p.value, d.delta_p.error);
  quantiles(d.delta_p_quantiles, 100.0, "%");
  share("RMS Δp", d.delta_p_rms.value, d.delta_p_rms.error);
  share("same top p", d.top1, d.top1_error);
  return out;
}

std::string divergence_table(const std::vector<DomainDivergence>& domains) {
  std::string out =
      "| domain | tokens | PPL(base) | PPL(Q) | ratio | mean KL | median | 99% | RMS Δp | same top p |\n"
      "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n";
  for (const auto& [domain, d] : domains)
    out += fmt::format("| {} | {} | {:.4f} | {:.4f} | {:.5f} ± {:.5f} | {:.5f} ± {:.5f} | {:.5f} | {:.4f} | {:.3f}% | {:.2f}% |\n", domain,
                       d.tokens, d.base_ppl, d.ppl, d.ppl_ratio, d.ppl_ratio_error, d.kl, d.kl_error, d.kl_median, d.kl_p99,
                       100.0 * d.delta_p_rms.value, 100.0 * d.top1);
  return out;
}

}  // namespace cachalot
