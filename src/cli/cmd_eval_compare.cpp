// cachalot eval compare: what each scheme of a model costs and gains, side by side.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/error.h"
#include "cli/bench_run.h"
#include "cli/cmd_eval.h"
#include "cli/compare_output.h"
#include "cli/eval_text.h"
#include "cli/read_file.h"
#include "eval/kl.h"
#include "io/atomic_file.h"

namespace cachalot {
namespace {

namespace fs = std::filesystem;

struct CompareFlags {
  ModelFlags model;
  TextFlags text{.file = {}, .method = "llama", .domains = {}, .windows = 8};
  std::vector<std::string> models;
  std::string base, markdown, svg, folder;
  int prompt = 512, generated = 64, repetitions = 3;
  bool no_speed = false, json = false, quiet = false;
};

struct Named {
  std::string name, path;
};
Named named(const std::string& text) {
  const size_t equals = text.find('=');
  if (equals != std::string::npos && equals > 0 && !fs::exists(text)) return {text.substr(0, equals), text.substr(equals + 1)};
  fs::path path(text);
  if (!path.has_filename()) path = path.parent_path();
  return {path.extension() == ".gguf" ? path.stem().string() : path.filename().string(), text};
}

// Files of log-probabilities of the base model, one for each domain, removed with the object.
class BaseFiles {
 public:
  explicit BaseFiles(const std::string& folder) {
    std::string pattern = (folder.empty() ? fs::temp_directory_path() : fs::path(folder)) / "cachalot-compare-XXXXXX";
    if (::mkdtemp(pattern.data()) == nullptr) fail("{}: cannot make a folder for the base model's log-probabilities", pattern);
    folder_ = pattern;
  }
  ~BaseFiles() {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }
  BaseFiles(const BaseFiles&) = delete;
  BaseFiles& operator=(const BaseFiles&) = delete;
  [[nodiscard]] fs::path of(size_t domain) const { return folder_ / std::to_string(domain); }

 private:
  fs::path folder_;
};

double file_bytes(const std::string& path) {
  const auto checkpoint = Checkpoint::open(path, PackedModels::accept);
  std::vector<std::string> files;
  for (const TensorInfo& tensor : checkpoint->tensors())
    if (std::find(files.begin(), files.end(), tensor.file) == files.end()) files.push_back(tensor.file);
  double bytes = 0.0;
  std::error_code error;
  for (const std::string& file : files) {
    const auto size = fs::file_size(file, error);
    if (!error) bytes += static_cast<double>(size);
  }
  return bytes;
}

class Compare {
 public:
  explicit Compare(const CompareFlags& flags) : flags_(flags), files_(flags.folder) {}

  Comparison run() {
    const Named base = named(flags_.base.empty() ? flags_.models[0] : flags_.base);
    out_.base = base.name;
    out_.prompt = flags_.prompt;
    out_.generated = flags_.generated;
    add(base, true);
    for (size_t i = flags_.base.empty() ? 1 : 0; i < flags_.models.size(); ++i) add(named(flags_.models[i]), false);
    return std::move(out_);
  }

 private:
  void add(const Named& which, bool is_base) {
    ModelOptions options = flags_.model.options();
    options.path = which.path;
    options.max_context = std::max(flags_.text.window, flags_.no_speed ? 0 : flags_.prompt + flags_.generated);
    options.show_progress = !flags_.quiet;
    options.needs_tokenizer = is_base;
    StoredWeights stored;
    options.on_linear = [&](std::span<const LinearSource> sources, const Linear& w) { stored.add(sources, w); };
    const LoadedModel model = load_model(options);
    const ModelCost cost(model.decoder, stored, 0.0);
    ComparedModel row{.name = which.name, .path = which.path, .type = stored.main_format(), .is_base = is_base};
    row.file_bytes = file_bytes(which.path);
    row.memory_bytes = static_cast<double>(model.decoder.weight_bytes());
    row.bits_per_weight = 8.0 * cost.stored_bytes() / cost.params();
    out_.device = model.ops->name();
    is_base ? measure_base(model, row) : measure(model, row);
    if (!flags_.no_speed) measure_speed(model, cost, row);
    out_.models.push_back(std::move(row));
  }

  void measure_base(const LoadedModel& model, ComparedModel& row) {
    method_ = method_options(flags_.text, model);
    out_.method = describe(method_);
    texts_ = read_domains(flags_.text, *model.tokenizer, method_);
    double sum = 0.0;
    for (size_t d = 0; d < texts_.size(); ++d) {
      const int available = static_cast<int>(texts_[d].tokens.size()) / method_.window;
      const int n = method_.max_windows > 0 ? std::min(method_.max_windows, available) : available;
      if (n == 0) fail("{}: {} tokens, fewer than one window of {}", texts_[d].file, texts_[d].tokens.size(), method_.window);
      LogitFileWriter writer(files_.of(d), method_.window, model.config.vocab,
                             std::span(texts_[d].tokens).first(static_cast<size_t>(n) * static_cast<size_t>(method_.window)));
      PerplexityOptions options = method_;
      options.on_scored = [&](std::span<const float> logits) { writer.add(logits); };
      options.progress = window_progress(flags_.quiet, row.name + ": perplexity");
      const PerplexityResult result = perplexity(*model.ops, model.decoder, texts_[d].tokens, options);
      writer.commit();
      end_progress(flags_.quiet);
      base_nll_.push_back(result.mean_nll);
      row.domains.push_back({.domain = texts_[d].domain, .tokens = result.tokens, .ppl = result.ppl, .ppl_ratio = 1.0, .top1 = 1.0});
      sum += result.mean_nll * static_cast<double>(result.tokens);
      row.all.tokens += result.tokens;
    }
    row.all.domain = "all";
    base_all_ = sum / static_cast<double>(row.all.tokens);
    row.all.ppl = std::exp(base_all_);
    row.all.ppl_ratio = row.all.top1 = 1.0;
  }

  void measure(const LoadedModel& model, ComparedModel& row) {
    DivergenceMeter all;
    PerplexityOptions options = method_;
    options.progress = window_progress(flags_.quiet, row.name + ": mean KL");
    // Ratios are of the base model's own perplexity: in its file, improbable tokens are cut off.
    const auto entry = [](const std::string& domain, const Divergence& d, double base_nll) {
      return ComparedDomain{.domain = domain,
                            .tokens = d.tokens,
                            .ppl = d.ppl,
                            .ppl_ratio = std::exp(d.nll - base_nll),
                            .kl = d.kl,
                            .kl_error = d.kl_error,
                            .kl_p99 = d.kl_p99,
                            .top1 = d.top1};
    };
    for (size_t d = 0; d < texts_.size(); ++d) {
      const LogitFile file(files_.of(d));
      const DivergenceMeter meter = divergence_from_file(*model.ops, model.decoder, file, options);
      row.domains.push_back(entry(texts_[d].domain, meter.result(), base_nll_[d]));
      all.merge(meter);
    }
    end_progress(flags_.quiet);
    row.all = entry("all", all.result(), base_all_);
  }

  void measure_speed(const LoadedModel& model, const ModelCost& cost, ComparedModel& row) const {
    const auto median = [&](const BenchTest& test) {
      const BenchSettings settings{.kv_format = model.ops->activation() == DType::bf16 ? KvFormat::bf16 : KvFormat::f32,
                                   .repetitions = flags_.repetitions};
      return spread_of(run_bench_test(*model.ops, model.decoder, cost, {}, test, settings).samples_ts()).median;
    };
    row.prefill_rate = median({.n_prompt = flags_.prompt});
    row.ttft_seconds = flags_.prompt / row.prefill_rate;
    row.decode_rate = median({.n_gen = flags_.generated, .n_depth = flags_.prompt});
  }

  const CompareFlags& flags_;
  BaseFiles files_;
  PerplexityOptions method_;
  std::vector<DomainTokens> texts_;
  std::vector<double> base_nll_;
  double base_all_ = 0.0;
  Comparison out_;
};

int compare(const CompareFlags& flags) {
  if (flags.text.method != "llama") fail("--method: compare scores as llama-perplexity does");
  if (flags.models.size() + (flags.base.empty() ? 0 : 1) < 2) fail("expected two models at least, or --base MODEL");
  const Comparison result = Compare(flags).run();
  const std::string markdown = comparison_markdown(result);
  if (!flags.markdown.empty()) write_atomically(flags.markdown, markdown);
  if (!flags.svg.empty()) write_atomically(flags.svg, comparison_svg(result));
  write_out(flags.json ? comparison_json(result).dump(2) + "\n" : markdown);
  return kExitOk;
}

}  // namespace

void add_eval_compare_command(CLI::App& eval, Context& context) {
  CLI::App* command = eval.add_subcommand("compare", "Schemes of one model side by side: size, speed, perplexity ratio, KL divergence");
  auto flags = std::make_shared<CompareFlags>();
  command->add_option("models", flags->models, "Models: paths, or NAME=PATH; the first is the base without --base")
      ->type_name("MODEL")
      ->required()
      ->take_all();
  command->add_option("--base", flags->base, "The model that all others are compared with")->type_name("MODEL");
  add_device_flags(*command, flags->model);
  add_text_flags(*command, flags->text);
  command->add_option("--prompt", flags->prompt, "Speed: tokens read")
      ->type_name("N")
      ->check(number_between(1, 1 << 20))
      ->default_str("512");
  command->add_option("--generate", flags->generated, "Speed: tokens generated behind them")
      ->type_name("N")
      ->check(number_between(1, 1 << 20))
      ->default_str("64");
  command->add_option("--repetitions", flags->repetitions, "Speed: runs, of which the median counts")
      ->type_name("N")
      ->check(number_between(1, 1000))
      ->default_str("3");
  command->add_flag("--no-speed", flags->no_speed, "Do not measure speed");
  command->add_option("--markdown", flags->markdown, "Write the table there too")->type_name("FILE");
  command->add_option("--svg", flags->svg, "Draw size against KL divergence")->type_name("FILE");
  command->add_option("--scratch", flags->folder, "Folder for the base model's log-probabilities, 2 bytes a token and vocabulary entry")
      ->type_name("DIR");
  add_output_flags(*command, flags->json, flags->quiet);
  command->callback([flags, &context] { context.action = [flags] { return compare(*flags); }; });
}

}  // namespace cachalot
