// cachalot eval ppl and eval kld: a text's perplexity, and how far a model is from the one it was made of.
#include <fmt/format.h>

#include <cmath>

#include "base/error.h"
#include "cli/cmd_eval.h"
#include "cli/eval_text.h"
#include "cli/read_file.h"
#include "eval/kl.h"

namespace cachalot {
namespace {

using Json = nlohmann::ordered_json;

struct PerplexityFlags {
  ModelFlags model;
  TextFlags text{.file = {}, .method = "windows", .domains = {}, .windows = 200};
  std::string base_file;  // to write
  bool json = false, quiet = false;
};

Json perplexity_json(const PerplexityResult& r) {
  return {{"mean_nll", r.mean_nll},
          {"ppl", r.ppl},
          {"ppl_error", r.ppl_error},
          {"windows", r.windows},
          {"windows_available", r.windows_available},
          {"tokens", r.tokens},
          {"method", r.method}};
}

PerplexityResult measure(const PerplexityFlags& flags, const LoadedModel& model, const DomainTokens& text, PerplexityOptions options) {
  options.progress = window_progress(flags.quiet, "perplexity");
  std::unique_ptr<LogitFileWriter> writer;
  if (!flags.base_file.empty()) {
    const int n = n_scored_windows(options, static_cast<int>(text.tokens.size()) / options.window);
    if (n == 0) fail("{}: {} tokens, fewer than one window of {}", text.file, text.tokens.size(), options.window);
    const std::span<const int> used = std::span(text.tokens).first(static_cast<size_t>(n) * static_cast<size_t>(options.window));
    writer = std::make_unique<LogitFileWriter>(flags.base_file, options.window, model.config.vocab, used);
    options.on_scored = [&](std::span<const float> logits) { writer->add(logits); };
  }
  PerplexityResult result = perplexity(*model.ops, model.decoder, text.tokens, options);
  if (writer) writer->commit();
  end_progress(flags.quiet);
  return result;
}

int eval_perplexity(const PerplexityFlags& flags) {
  if (!flags.base_file.empty() && (flags.text.method != "llama" || !flags.text.domains.empty()))
    fail("--kl-divergence-base: holds one text as llama-perplexity cuts it: give --method llama and -f");
  ModelOptions options = flags.model.options();
  options.max_context = flags.text.window;
  options.show_progress = !flags.quiet;
  const LoadedModel model = load_model(options);
  const PerplexityOptions method = method_options(flags.text, model);
  const std::vector<DomainTokens> texts = read_domains(flags.text, *model.tokenizer, method);
  std::vector<PerplexityResult> results;
  for (const DomainTokens& text : texts) results.push_back(measure(flags, model, text, method));
  double sum = 0.0;
  int64_t tokens = 0;
  for (const PerplexityResult& r : results) {
    sum += r.mean_nll * static_cast<double>(r.tokens);
    tokens += r.tokens;
  }
  const double mean = sum / static_cast<double>(tokens);
  const auto sentence = [](const PerplexityResult& r) {
    return fmt::format(
        "perplexity {:.4f} +- {:.4f}, mean negative log-likelihood {:.6f} nats over {} tokens ({} of {} windows; method: {})\n", r.ppl,
        r.ppl_error, r.mean_nll, r.tokens, r.windows, r.windows_available, r.method);
  };
  const bool one = flags.text.domains.empty();
  if (flags.json) {
    Json out = one ? perplexity_json(results[0]) : Json{{"mean_nll", mean}, {"ppl", std::exp(mean)}, {"tokens", tokens}};
    out["window"] = flags.text.window;
    out["model"] = model.path;
    if (one) out["file"] = texts[0].file;
    out["device"] = model.ops->name();
    for (size_t i = 0; i < texts.size() && !one; ++i) {
      Json domain{{"domain", texts[i].domain}, {"file", texts[i].file}};
      domain.update(perplexity_json(results[i]));
      out["domains"].push_back(std::move(domain));
    }
    write_out(out.dump() + "\n");
  } else if (one) {
    write_out(sentence(results[0]));
  } else {
    std::string out;
    for (size_t i = 0; i < texts.size(); ++i) out += texts[i].domain + ": " + sentence(results[i]);
    write_out(out + fmt::format("all: perplexity {:.4f}, mean negative log-likelihood {:.6f} nats over {} tokens\n", std::exp(mean), mean,
                                tokens));
  }
  return kExitOk;
}

struct DivergenceFlags {
  ModelFlags model;
  TextFlags text{.file = {}, .method = "llama", .domains = {}};
  std::string base_model, base_file;
  bool json = false, quiet = false;
};

std::vector<DomainDivergence> tell_all(std::vector<std::pair<std::string, DivergenceMeter>> meters) {
  std::vector<DomainDivergence> out;
  DivergenceMeter all;
  for (const auto& [domain, meter] : meters) {
    out.push_back({domain, meter.result()});
    all.merge(meter);
  }
  if (out.size() > 1) out.push_back({"all", all.result()});
  return out;
}

int eval_divergence(const DivergenceFlags& flags) {
  if (flags.base_file.empty() == flags.base_model.empty())
    fail("expected what to compare with: --base-model MODEL, or --kl-divergence-base FILE that `eval ppl` or llama-perplexity wrote");
  if (!flags.base_file.empty() && !(flags.text.file.empty() && flags.text.domains.empty()))
    fail("--kl-divergence-base: {} holds its text, and -f and --domain name another", flags.base_file);
  std::optional<LogitFile> base;
  if (!flags.base_file.empty()) base.emplace(flags.base_file);
  ModelOptions options = flags.model.options();
  options.max_context = base ? base->window() : flags.text.window;
  options.show_progress = !flags.quiet;
  const LoadedModel model = load_model(options);
  PerplexityOptions method = method_options(flags.text, model);
  method.progress = window_progress(flags.quiet, "mean KL");
  std::vector<std::pair<std::string, DivergenceMeter>> meters;
  if (base) {
    method.method = PerplexityMethod::llama;
    method.window = base->window();
    meters.emplace_back("text", divergence_from_file(*model.ops, model.decoder, *base, method));
  } else {
    options.path = flags.base_model;
    options.tokenizer.clear();
    const LoadedModel original = load_model(options);
    for (const DomainTokens& text : read_domains(flags.text, *original.tokenizer, method))
      meters.emplace_back(text.domain,
                          divergence_between({*original.ops, original.decoder}, {*model.ops, model.decoder}, text.tokens, method));
  }
  end_progress(flags.quiet);
  const std::vector<DomainDivergence> domains = tell_all(std::move(meters));
  if (flags.json) {
    Json out{{"model", model.path},
             {base ? "base_file" : "base_model", base ? flags.base_file : flags.base_model},
             {"method", describe(method)},
             {"device", model.ops->name()}};
    for (const DomainDivergence& d : domains) {
      Json domain{{"domain", d.domain}};
      domain.update(divergence_json(d.divergence));
      out["domains"].push_back(std::move(domain));
    }
    write_out(out.dump() + "\n");
    return kExitOk;
  }
  std::string out = fmt::format("{} against {}; method: {}\n", model.path, base ? flags.base_file : flags.base_model, describe(method));
  if (domains.size() > 1) out += "\n" + divergence_table(domains) + "\nall: ";
  write_out(out + divergence_text(domains.back().divergence));
  return kExitOk;
}

}  // namespace

void add_eval_text_commands(CLI::App& eval, Context& context) {
  CLI::App* ppl = eval.add_subcommand("ppl", "Perplexity of texts");
  auto ppl_flags = std::make_shared<PerplexityFlags>();
  add_model_flags(*ppl, ppl_flags->model);
  add_text_flags(*ppl, ppl_flags->text);
  ppl->add_option("--kl-divergence-base,--save-all-logits", ppl_flags->base_file,
                  "Write the log-probabilities there, in llama-perplexity's format, for eval kld (with --method llama)")
      ->type_name("FILE");
  add_output_flags(*ppl, ppl_flags->json, ppl_flags->quiet);
  ppl->callback([ppl_flags, &context] { context.action = [ppl_flags] { return eval_perplexity(*ppl_flags); }; });

  CLI::App* kld = eval.add_subcommand("kld", "KL divergence from a base model, with perplexity ratio and agreement");
  auto kld_flags = std::make_shared<DivergenceFlags>();
  add_model_flags(*kld, kld_flags->model);
  kld->add_option("--base-model", kld_flags->base_model, "The model to compare with, run beside it on -f or --domain")->type_name("PATH");
  kld->add_option("--kl-divergence-base", kld_flags->base_file, "Its log-probabilities on a text, of eval ppl or llama-perplexity")
      ->type_name("FILE");
  add_text_flags(*kld, kld_flags->text);
  add_output_flags(*kld, kld_flags->json, kld_flags->quiet);
  kld->callback([kld_flags, &context] { context.action = [kld_flags] { return eval_divergence(*kld_flags); }; });
}

}  // namespace cachalot
