// cachalot quantize: a smaller model, and a report of what was lost.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <optional>

#include "base/error.h"
#include "base/hash.h"
#include "cli/backend.h"
#include "cli/commands.h"
#include "cli/load_tokenizer.h"
#include "cli/process.h"
#include "cli/read_file.h"
#include "cli/run_flags.h"
#include "convert/hf_view.h"
#include "io/atomic_file.h"
#include "io/pack_file.h"
#include "ops/staged_ops.h"
#include "quant/gguf_sink.h"
#include "quant/hf_sink.h"
#include "quant/imatrix.h"
#include "quant/mix_search.h"
#include "quant/report.h"
#include "text/chat_prompt.h"

namespace cachalot {
namespace {

constexpr size_t kMaxText = 1u << 30;  // bytes

struct QuantizeFlags {
  std::string model, out, format, type, method, device = "cpu", report, tokenizer, imatrix, target_size;
  std::vector<std::string> domains, calibration, evaluation, rules, keep;
  int threads = 0, window = 512, held_out_windows = 8, min_expert_tokens = 256;
  int64_t tokens = 65536;
  double damping = 0.0, target_bits = 0.0, target_ppl = 0.0, shard_gigabytes = 5.0;
  bool resume = false, force = false, quiet = false, json = false, chat = false, all_experts = false, plain = false,
       quantized_inputs = false, no_act_order = false, dry_run = false, measure = false, span = false;
};

Method method_of(const std::string& name) {
  for (const Method m : {Method::rtn, Method::awq, Method::gptq, Method::awq_gptq})
    if (name == name_of(m)) return m;
  fail("--method: found \"{}\", expected rtn, awq, gptq or awq+gptq", printable(name));
}

std::pair<std::string, std::string> split_at_equals(const std::string& text, const char* flag, const char* expected) {
  const size_t at = text.find('=');
  if (at == std::string::npos || at == 0 || at + 1 == text.size()) fail("{}: found \"{}\", expected {}", flag, printable(text), expected);
  return {text.substr(0, at), text.substr(at + 1)};
}

Scheme scheme_named(const std::string& name, const char* flag) {
  const auto scheme = scheme_of_name(name);
  if (!scheme)
    fail("{}: found \"{}\", expected a type such as q4_k, q8_0, iq4_nl, bf16, fp8, int4-g128, int8-row-sym", flag, printable(name));
  return *scheme;
}

// gguf for a file's name, unless --format says something.
FileFormat format_of(const QuantizeFlags& flags) {
  if (flags.format.empty()) return FileFormat::gguf;
  const auto format = file_format_of_name(flags.format);
  if (!format) fail("--format: found \"{}\", expected gguf, awq, gptq, gptq_v2, compressed-tensors or fp8", printable(flags.format));
  if (*format != FileFormat::gguf && flags.out.ends_with(".gguf"))
    fail("-o {}: --format {} makes a directory, whose name should not end in .gguf", printable(flags.out), flags.format);
  return *format;
}

Recipe recipe_of(const QuantizeFlags& flags, const Config& config) {
  Recipe recipe;
  recipe.method = method_of(flags.method);
  const bool gguf = format_of(flags) == FileFormat::gguf;
  // Only GGUF has kv_b in halves; a type that no GGUF file holds is measured as the other formats store it.
  const auto single = scheme_of_name(flags.type);
  recipe.split_kv_b = config.mla && gguf && !(single && info(single->format).gguf_type < 0);
  if (flags.span) recipe.search = RangeSearch::span;
  recipe.min_expert_tokens = flags.min_expert_tokens;
  recipe.all_experts = flags.all_experts;
  recipe.meet_earlier_errors = !flags.quantized_inputs;
  recipe.gptq = {.damping = static_cast<float>(flags.damping), .act_order = !flags.no_act_order};
  for (const std::string& pattern : flags.keep) recipe.rules.push_back({pattern, {Format::bf16}});
  for (const std::string& rule : flags.rules) {
    const auto [pattern, type] = split_at_equals(rule, "--rule", "PATTERN=TYPE");
    recipe.rules.push_back({pattern, scheme_named(type, "--rule")});
  }
  if (const auto mix = gguf_mix(flags.type, config, recipe.split_kv_b)) {
    for (const auto& entry : *mix) {  // rules go before the mix
      const bool ruled =
          std::any_of(recipe.rules.begin(), recipe.rules.end(), [&](const SchemeRule& r) { return glob_matches(r.pattern, entry.first); });
      if (!ruled) recipe.exact[entry.first] = entry.second;
    }
    recipe.scheme = {flags.type.starts_with("q4") ? Format::q4_k : Format::q5_k};
  } else {
    recipe.scheme = scheme_named(flags.type, "--type");
    if (gguf && !flags.plain && !is_float(recipe.scheme.format)) {
      // What is small and what everything passes through is kept finer: shared experts, and leading dense layers beside experts.
      const Scheme fine{Format::q8_0};
      if (bits_per_weight(recipe.scheme, 256) < 8.0) {
        recipe.rules.push_back({"*_shexp.weight", fine});
        for (int l = 0; config.n_experts > 0 && l < config.first_dense; ++l) recipe.rules.push_back({fmt::format("blk.{}.ffn_*", l), fine});
        recipe.rules.push_back({"*attn_v_b.weight", fine});
      }
      for (const char* name : {"token_embd.weight", "output.weight"}) recipe.rules.push_back({name, {Format::q8_0}});
    }
  }
  return recipe;
}

CalibrationSet read_texts(const QuantizeFlags& flags, const Tokenizer& tokenizer, const std::string& chat_template, const Config& config,
                          bool calibrates) {
  RenderChat render;
  std::optional<ChatTemplate> parsed;
  if (flags.chat) {
    if (chat_template.empty()) fail("--chat: {} has no chat template", flags.model);
    parsed.emplace(ChatTemplate::parse(chat_template, flags.model));
    render = [&](const std::string& messages) {
      return make_chat_prompt(tokenizer, *parsed, nlohmann::ordered_json::parse(messages)).text;
    };
  }
  std::vector<DomainText> texts;
  const auto add = [&](const std::string& domain, const std::string& file) {
    texts.push_back({domain, file, documents_of(file, read_input_file(file, kMaxText), render)});
  };
  for (const std::string& file : flags.calibration) add(std::filesystem::path(file).stem().string(), file);
  for (const std::string& domain : flags.domains) {
    const auto [name, file] = split_at_equals(domain, "--domain", "NAME=FILE");
    add(name, file);
  }
  CalibrationSet set;
  CalibrationOptions options{.window = flags.window, .tokens = flags.tokens, .held_out_windows = flags.held_out_windows};
  options.bos_id = bos_before_text(tokenizer, config);
  options.parse_special = flags.chat;
  if (!flags.evaluation.empty()) options.held_out = 0.0;
  if (!calibrates) options.min_tokens = 0;
  set.calibration.window = set.held_out.window = flags.window;
  if (!texts.empty()) set = make_calibration_set(tokenizer, texts, options);
  for (const std::string& domain : flags.evaluation) {
    const auto [name, file] = split_at_equals(domain, "--eval", "NAME=FILE");
    auto found = std::find_if(set.domains.begin(), set.domains.end(), [&, n = name](const DomainStats& d) { return d.domain == n; });
    if (found == set.domains.end()) found = set.domains.insert(set.domains.end(), {.domain = name, .file = file});
    const int before = set.held_out.n_windows();
    append_windows(set.held_out, tokenizer.encode(read_input_file(file, kMaxText)), static_cast<int>(found - set.domains.begin()),
                   options.bos_id, flags.held_out_windows);
    found->held_out += int64_t{set.held_out.n_windows() - before} * flags.window;
    if (set.held_out.n_windows() == before) fail("{}: fewer tokens than one window of {}", file, flags.window);
  }
  return set;
}

// Weighs rounding errors by an importance matrix. What it lacks is told, and MLA's parts without data stay at 8 bits.
void use_imatrix(const std::string& file, const Config& config, Recipe& recipe) {
  if (recipe.uses_awq()) fail("--imatrix: {} scales columns by the text that it calibrates on; choose rtn or gptq", name_of(recipe.method));
  auto imatrix = std::make_shared<ImportanceMatrix>(ImportanceMatrix::read(file));
  const std::vector<PlannedMatrix> planned = plan(recipe, config);
  const ImatrixFit fit = fit_of(*imatrix, planned);
  for (const std::string& name : fit.missing) {
    const bool fine = name.ends_with("attn_k_b.weight") || name.ends_with("attn_v_b.weight") || name.ends_with("attn_kv_b.weight");
    const auto at = std::find_if(planned.begin(), planned.end(), [&](const PlannedMatrix& p) { return p.matrix.name == name; });
    const bool raise = fine && bits_per_weight(at->scheme, at->matrix.in) < 8.0;
    if (raise) recipe.exact[name] = {Format::q8_0};
    fmt::print(stderr, "warning: {}: no entry for {}: {}\n", file, name, raise ? "kept as q8_0" : "its errors are not weighted");
  }
  for (const std::string& line : fit.neutral) fmt::print(stderr, "warning: {}: {}: its errors are not weighted\n", file, line);
  for (const std::string& name : fit.unknown) fmt::print(stderr, "warning: {}: {} is no tensor of this model\n", file, printable(name));
  recipe.imatrix = std::move(imatrix);
}

void print_plan(const std::vector<PlannedMatrix>& planned) {
  std::string out;
  for (const PlannedMatrix& p : planned)
    out += fmt::format("{:32} {} x [{}, {}]  {}{}\n", p.matrix.name, p.matrix.n_matrices, p.matrix.out, p.matrix.in, name_of(p.scheme),
                       p.fell_back() ? fmt::format("  ({} does not divide rows of {})", name_of(p.wanted), p.matrix.in) : "");
  out += fmt::format("{:.3f} bits a weight, {:.3f} without embedding and head\n", mean_bits(planned, false), mean_bits(planned, true));
  write_out(out);
}

// A hash of everything that the numbers are made of beside the recipe.
std::string hash_of(const CalibrationSet& set, const std::vector<PlannedMatrix>& planned) {
  Xxh3 hash;
  for (const TokenStream* stream : {&set.calibration, &set.held_out}) hash.add(std::as_bytes(std::span<const int>(stream->inputs)));
  for (const PlannedMatrix& p : planned) hash.add(std::as_bytes(std::span<const char>(p.matrix.name + " " + name_of(p.scheme) + "\n")));
  return fmt::format("{:016x}", hash.value());
}

// What a run that goes on must have in common with the one that was interrupted.
nlohmann::ordered_json facts_of(const QuantizeFlags& flags, const Checkpoint& checkpoint, const std::string& hash) {
  int64_t bytes = 0;
  for (const TensorInfo& tensor : checkpoint.tensors()) bytes += static_cast<int64_t>(tensor.data.size());
  return {{"source", std::filesystem::weakly_canonical(checkpoint.name()).string()},
          {"source bytes", bytes},
          {"--format", flags.format},
          {"--type", flags.type},
          {"--method", flags.method},
          {"--rule", flags.rules},
          {"--keep", flags.keep},
          {"--imatrix", flags.imatrix.empty() ? std::string() : fmt::format("{:016x}", hash_of_file(flags.imatrix))},
          {"--damping", flags.damping},
          {"--no-act-order", flags.no_act_order},
          {"--quantized-inputs", flags.quantized_inputs},
          {"--all-experts", flags.all_experts},
          {"--min-expert-tokens", flags.min_expert_tokens},
          {"--shard-gb", flags.shard_gigabytes},
          {"text and types", hash}};
}

struct Output {
  std::unique_ptr<PartialRun> run;
  std::unique_ptr<QuantizeSink> sink;
};

// Where the model goes. Tells `options` of what an interrupted run has already.
Output open_output(const QuantizeFlags& flags, const Checkpoint& checkpoint, const Recipe& recipe, const std::string& hash,
                   QuantizeOptions& options) {
  const FileFormat format = format_of(flags);
  Output out;
  const auto start = flags.resume ? PartialRun::Start::resume : flags.force ? PartialRun::Start::anew : PartialRun::Start::fresh;
  out.run = std::make_unique<PartialRun>(flags.out, facts_of(flags, checkpoint, hash), start);
  options.layers_done = out.run->layers_done();
  options.done = out.run->result();
  options.saved = [run = out.run.get()](int layers_done, const LayerResult& result) { run->save(layers_done, result); };
  if (format == FileFormat::gguf) {
    std::vector<std::pair<std::string, std::string>> metadata{{"cachalot.quantize.method", name_of(recipe.method)},
                                                              {"cachalot.quantize.type", flags.type}};
    if (recipe.imatrix) {
      metadata.emplace_back("quantize.imatrix.file", flags.imatrix);
      if (!recipe.imatrix->datasets.empty()) metadata.emplace_back("quantize.imatrix.dataset", recipe.imatrix->datasets.front());
    }
    auto sink = std::make_unique<GgufSink>(checkpoint, flags.out, gguf_file_type(flags.type), metadata, out.run.get());
    options.written = [made = sink.get()]() -> const Checkpoint& { return made->written(); };
    out.sink = std::move(sink);
    return out;
  }
  auto sink = std::make_unique<HfSink>(
      checkpoint, *out.run,
      HfSinkOptions{.format = format,
                    .folded = recipe.uses_awq(),
                    .shard_bytes = static_cast<uint64_t>(flags.shard_gigabytes * 1e9),
                    .companions = checkpoint.gguf() != nullptr ? std::filesystem::path(flags.tokenizer) : std::filesystem::path()});
  options.written = [made = sink.get()]() -> const Checkpoint& { return made->written(); };
  out.sink = std::move(sink);
  return out;
}

// "700MB", "1.5 GB", "7000000".
double bytes_of(const std::string& text, const char* flag) {
  double value = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  std::string unit(end, text.data() + text.size());
  std::erase(unit, ' ');
  std::transform(unit.begin(), unit.end(), unit.begin(), [](char c) { return static_cast<char>(std::tolower(c)); });
  constexpr std::pair<std::string_view, double> kUnits[] = {{"", 1.0}, {"b", 1.0}, {"kb", 1e3}, {"mb", 1e6}, {"gb", 1e9}, {"tb", 1e12}};
  const auto* const found = std::find_if(std::begin(kUnits), std::end(kUnits), [&](const auto& entry) { return entry.first == unit; });
  if (error != std::errc() || !(value > 0.0) || found == std::end(kUnits))
    fail("{}: found \"{}\", expected a size such as 700MB or 1.5GB", flag, printable(text));
  return value * found->second;
}

// What matrices of the layers may have when all matrices together take `bytes`.
double bits_for_size(const std::vector<PlannedMatrix>& planned, double bytes) {
  double rest = 8.0 * bytes, weights = 0.0;
  for (const PlannedMatrix& p : planned) {
    const auto n = static_cast<double>(p.matrix.n_weights());
    if (p.matrix.name.starts_with("blk."))
      weights += n;
    else
      rest -= n * bits_per_weight(p.scheme, p.matrix.in);
  }
  const double bits = rest / weights;
  if (bits < 2.0)
    fail("--target-size: {:.0f} bytes leave {:.2f} bits a weight beside embedding and head, expected at least 2", bytes,
         std::max(0.0, bits));
  return bits;
}

// Refuses what cannot be written to, before any work; --force replaces files and models, not folders of something else.
void check_place(const QuantizeFlags& flags, FileFormat format) {
  const std::filesystem::path out = flags.out;
  if (!std::filesystem::exists(out)) return;
  const bool folder = std::filesystem::is_directory(out);
  if (folder && format == FileFormat::gguf) fail("-o {}: is a directory, expected the name of a GGUF file", flags.out);
  if (!folder && format != FileFormat::gguf) fail("-o {}: is a file, but --format {} makes a directory", flags.out, flags.format);
  if (!flags.force) fail("{}: is there already; --force replaces it", flags.out);
  if (folder && !std::filesystem::is_empty(out) && !std::filesystem::exists(out / "config.json"))
    fail("-o {}: is a directory that holds no model; --force does not replace it", flags.out);
}

// What is allowed, and yet hardly meant.
void warn(const QuantizeFlags& flags, const Checkpoint& checkpoint, const std::vector<PlannedMatrix>& planned) {
  const auto warn_if_idle = [&](const char* flag, const std::string& pattern) {
    const bool matches =
        std::any_of(planned.begin(), planned.end(), [&](const PlannedMatrix& p) { return glob_matches(pattern, p.matrix.name); });
    if (!matches) fmt::print(stderr, "warning: {}: no matrix has a name like \"{}\"; --dry-run prints them\n", flag, printable(pattern));
  };
  for (const std::string& pattern : flags.keep) warn_if_idle("--keep", pattern);
  for (const std::string& rule : flags.rules) warn_if_idle("--rule", rule.substr(0, rule.find('=')));

  double all = 0.0, rounded = 0.0;
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    double weights = tensor.weights_each;
    for (const int64_t n : tensor.shape) weights *= static_cast<double>(n);
    all += weights;
    if (static_cast<double>(tensor.data.size()) < weights) rounded += weights;  // fewer than 8 bits each
  }
  if (rounded > 0.1 * all)
    fmt::print(
        stderr,
        "warning: {}: {:.0f}% of its weights have fewer than 8 bits already; rounding them again adds to what that cost, so start from "
        "the original if it can be had\n",
        flags.model, 100.0 * rounded / all);

  const auto file_of = [](const std::string& named) { return std::filesystem::weakly_canonical(named.substr(named.find('=') + 1)); };
  for (const std::string& evaluated : flags.evaluation) {
    const auto same = [&](const std::string& text) { return file_of(text) == file_of(evaluated); };
    if (std::any_of(flags.domains.begin(), flags.domains.end(), same) ||
        std::any_of(flags.calibration.begin(), flags.calibration.end(), same))
      fmt::print(stderr, "warning: --eval {}: is calibrated on as well, so the loss on it looks smaller than it is\n",
                 printable(evaluated));
  }
}

// A model, and the view of it whose names a directory wants.
struct OpenModel {
  std::unique_ptr<Checkpoint> file;  // of a GGUF file behind a view
  std::unique_ptr<Checkpoint> checkpoint;
  Config config;
};
OpenModel open_model(const QuantizeFlags& flags, FileFormat format) {
  OpenModel m;
  m.checkpoint = Checkpoint::open(flags.model);
  m.config = read_config(*m.checkpoint);
  if (format == FileFormat::gguf || m.checkpoint->gguf() == nullptr) return m;
  if (flags.tokenizer.empty())
    fail("{}: a GGUF file has no tokenizer.json for a directory: --tokenizer names a folder that has the model's", flags.model);
  const std::filesystem::path given = flags.tokenizer;
  const bool file = given.filename() == "tokenizer.json";
  if (!std::filesystem::exists(file ? given : given / "tokenizer.json"))
    fail("--tokenizer {}: found no tokenizer.json, expected a folder with the model's", flags.tokenizer);
  m.file = std::move(m.checkpoint);
  m.checkpoint = make_hf_view(*m.file, m.config);
  return m;
}

// Refuses --measure without text or beside -o, and a place that cannot be written to.
void check_output(const QuantizeFlags& flags, FileFormat format) {
  if (flags.measure) {
    if (!flags.out.empty()) fail("--measure: writes no file, found -o as well");
    if (flags.domains.empty() && flags.calibration.empty() && flags.evaluation.empty())
      fail("--measure: expected text, by --domain or --eval");
    return;
  }
  if (flags.out.empty()) fail("-o: expected a place to write to");
  check_place(flags, format);
}

CalibrationSet texts_for(const QuantizeFlags& flags, const OpenModel& model, Method method) {
  CalibrationSet set;
  set.calibration.window = set.held_out.window = flags.window;
  if (flags.calibration.empty() && flags.domains.empty() && flags.evaluation.empty()) return set;
  const Tokenizer tokenizer =
      flags.tokenizer.empty() ? tokenizer_of(*model.checkpoint, model.config.eos_ids) : load_tokenizer(flags.tokenizer);
  const std::string file = model.checkpoint->chat_template_file();
  return read_texts(flags, tokenizer, file.empty() ? tokenizer.chat_template() : file, model.config, method != Method::rtn);
}

// What --target-bits, --target-size and --target-ppl ask for; none where none was given.
std::optional<MixGoal> goal_of(const QuantizeFlags& flags, FileFormat format, const Recipe& recipe, const Config& config) {
  const double size = flags.target_size.empty() ? 0.0 : bytes_of(flags.target_size, "--target-size");
  if (!(flags.target_bits > 0.0 || flags.target_ppl > 0.0 || size > 0.0)) return std::nullopt;
  if (format != FileFormat::gguf)
    fail("--target-bits, --target-size and --target-ppl search mixes of block types, which only gguf files hold");
  MixGoal goal{.bits = flags.target_bits, .ppl_ratio = flags.target_ppl};
  if (size > 0.0) {
    const double bits = bits_for_size(plan(recipe, config), size);
    goal.bits = goal.bits > 0.0 ? std::min(goal.bits, bits) : bits;
  }
  return goal;
}

void print_report(const QuantizeFlags& flags, const QuantizeReport& report, const ReportContext& context) {
  const std::string json = report_json(report, context).dump(2) + "\n", markdown = report_markdown(report, context);
  if (!flags.report.empty()) {
    write_atomically(flags.report + ".json", json);
    write_atomically(flags.report + ".md", markdown);
  }
  if (flags.json)
    write_out(json);
  else if (!flags.quiet)
    write_out(markdown.substr(0, markdown.find("\n## Matrices")) + "\n");
}

int quantize(QuantizeFlags flags) {
  const FileFormat format = format_of(flags);
  if (flags.type.empty()) flags.type = default_type(format);
  if (flags.method.empty()) flags.method = name_of(flags.domains.empty() && flags.calibration.empty() ? Method::rtn : Method::gptq);
  const OpenModel model = open_model(flags, format);
  const Checkpoint& checkpoint = *model.checkpoint;
  const Config& config = model.config;
  Recipe recipe = recipe_of(flags, config);
  std::vector<std::string> notes;
  if (format != FileFormat::gguf) notes = fit_recipe(format, config, checkpoint, recipe);
  if (!flags.imatrix.empty()) use_imatrix(flags.imatrix, config, recipe);
  const std::vector<PlannedMatrix> planned = plan(recipe, config);
  const std::optional<MixGoal> goal = goal_of(flags, format, recipe, config);
  warn(flags, checkpoint, planned);
  if (flags.dry_run) {
    print_plan(planned);
    return kExitOk;
  }
  check_output(flags, format);
  const auto device = make_ops(flags.device, {.n_threads = flags.threads, .f32 = true});
  const auto staged = device->host_memory() ? nullptr : make_staged_ops(*device);
  Ops* const ops = staged ? staged.get() : device.get();
  ThreadPool pool(flags.threads);
  CalibrationSet set = texts_for(flags, model, recipe.method);
  recipe.importance = recipe.imatrix || set.calibration.n_windows() > 0;
  std::vector<std::string> names;
  for (const DomainStats& d : set.domains) names.push_back(d.domain);
  const bool live = !flags.quiet && stderr_is_terminal();
  const auto progress = [&](int done, int total, const std::string& what) {
    if (live) fmt::print(stderr, "\r\x1b[Klayer {}/{}: {}", std::min(done + 1, total), total, what);
  };
  if (goal) {
    const MixSearchResult mix = search_mix(checkpoint, config, *ops, pool, recipe, set, *goal, progress);
    for (const auto& [name, scheme] : mix.schemes) recipe.exact[name] = scheme;
    if (!flags.quiet)
      fmt::print(stderr, "{}mix: {:.3f} bits a weight, expected perplexity ratio {:.4f}\n", live ? "\r\x1b[K" : "", mix.bits,
                 mix.expected_ppl_ratio);
  }
  LayerQuantizer quantizer(checkpoint, config, *ops, pool, recipe, flags.window);
  QuantizeOptions options{.keep = false, .progress = progress};
  Output output;
  if (!flags.measure) output = open_output(flags, checkpoint, recipe, hash_of(set, quantizer.planned()), options);
  std::vector<QuantizeSink*> sinks;
  if (output.sink) sinks.push_back(output.sink.get());
  const QuantizeReport report =
      quantize_model(quantizer, checkpoint, config, *ops, recipe, set.calibration, set.held_out, names, sinks, options);
  if (live) fmt::print(stderr, "\r\x1b[K");
  if (const auto* gguf = dynamic_cast<const GgufSink*>(output.sink.get())) notes = gguf->result().notes;
  for (const std::string& note : notes) fmt::print(stderr, "note: {}\n", note);
  print_report(flags, report, {.model = flags.model, .out = flags.out, .type = flags.type, .recipe = recipe, .calibration = set.domains});
  return kExitOk;
}

}  // namespace

void add_quantize_command(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand("quantize", "Make a model smaller, with a report of what was lost");
  auto flags = std::make_shared<QuantizeFlags>();
  command->add_option("-m,--model", flags->model, "Model: a directory or file of safetensors, or a GGUF file")
      ->type_name("PATH")
      ->required();
  command->add_option("-o,--out", flags->out, "What to write: a GGUF file, or the directory of another --format")->type_name("PATH");
  command
      ->add_option("--format", flags->format,
                   "gguf, or a directory as Hugging Face has it: awq (AutoAWQ GEMM), gptq, gptq_v2, compressed-tensors, fp8 (128 x 128)")
      ->type_name("NAME")
      ->default_str("gguf");
  command->add_option("--shard-gb", flags->shard_gigabytes, "Directories: largest size of a file, in units of 10^9 bytes")
      ->type_name("X")
      ->check(number_between(1e-6, 1e6))
      ->default_str("5");
  command->add_flag("--resume", flags->resume, "Go on with a run that was interrupted, from OUT.partial");
  command
      ->add_option("--type", flags->type,
                   "gguf: a mix (q4_k_m, q4_k_s, q5_k_m, q5_k_s) or one type: q2_k to q6_k, q4_0 to q8_0, iq4_nl, iq4_xs, f16, bf16. "
                   "Directories: int4 or int8 with -g32, -g64, -g128 or -row and -sym or -zp, such as int4-g128-zp; fp8")
      ->type_name("TYPE")
      ->default_str("q4_k_m, int4-g128-zp or -sym, fp8");
  command->add_option("--method", flags->method, "rtn (round to nearest), awq, gptq or awq+gptq; all but rtn need text")
      ->type_name("NAME")
      ->default_str("gptq with calibration text, else rtn");
  command->add_option("--calib", flags->calibration, "Calibration text, plain or .jsonl; its name is the domain")->type_name("FILE");
  command->add_option("--domain", flags->domains, "The same with a name for the domain; may be given several times")
      ->type_name("NAME=FILE");
  command->add_option("--eval", flags->evaluation, "Text to measure the loss on, in place of the end of the calibration text")
      ->type_name("NAME=FILE");
  command->add_option("--imatrix", flags->imatrix, "Importance matrix that weighs rounding errors, of llama-imatrix or cachalot imatrix")
      ->type_name("FILE");
  command->add_flag("--chat", flags->chat, "Apply the model's chat template to the \"messages\" of .jsonl lines");
  command->add_option("--tokens", flags->tokens, "Calibration tokens, shared evenly among domains")
      ->type_name("N")
      ->check(number_between(1, 1e12))
      ->default_str("65536");
  command->add_option("--window", flags->window, "Tokens of a window")
      ->type_name("N")
      ->check(number_between(16, 1 << 16))
      ->default_str("512");
  command->add_option("--eval-windows", flags->held_out_windows, "Windows of each domain to measure on")
      ->type_name("N")
      ->check(number_between(0, 1 << 20))
      ->default_str("8");
  command->add_option("--rule", flags->rules, "Another type for the tensors whose GGUF names match; the first match wins")
      ->type_name("PATTERN=TYPE");
  command->add_option("--keep", flags->keep, "Tensors to keep in bf16")->type_name("PATTERN");
  command->add_flag("--plain", flags->plain, "With one type: no finer types for shared experts, leading dense layers, embedding and head");
  command
      ->add_option("--target-bits", flags->target_bits, "Search the mix of types: at most so many bits a weight, embedding and head aside")
      ->type_name("X")
      ->check(number_between(2, 16));
  command
      ->add_option("--target-size", flags->target_size,
                   "Search the mix of types: all matrices together in at most so many bytes (700MB, 1.5GB; 1 kB is 1000 bytes)")
      ->type_name("BYTES");
  command
      ->add_option("--target-ppl", flags->target_ppl,
                   "Search the mix of types: the smallest whose perplexity is at most X times the original's")
      ->type_name("X")
      ->check(number_between(1, 10));
  command->add_option("--damping", flags->damping, "GPTQ: share of the mean diagonal added to it [what held-out tokens show]")
      ->type_name("X")
      ->check(number_between(1e-6, 1));
  command->add_flag("--no-act-order", flags->no_act_order, "GPTQ: columns in their own order");
  command->add_flag("--quantized-inputs", flags->quantized_inputs, "GPTQ: do not aim at the unquantized model's outputs");
  command->add_flag("--span", flags->span, "Integer groups and FP8 blocks: scales from the largest weight, not the best fit");
  command->add_flag("--all-experts", flags->all_experts, "Calibrate every expert on every token, unrouted ones at a small weight");
  command->add_option("--min-expert-tokens", flags->min_expert_tokens, "An expert with fewer routed tokens is filled up with others'")
      ->type_name("N")
      ->check(number_between(0, 1 << 30))
      ->default_str("256");
  command->add_option("--report", flags->report, "Write NAME.md and NAME.json")->type_name("NAME");
  command->add_flag("--measure", flags->measure, "Write no file: only report what would be lost");
  command->add_flag("--dry-run", flags->dry_run, "Print which tensor becomes what, and stop");
  command->add_option("--tokenizer", flags->tokenizer, "In place of the model's own")->type_name("PATH");
  command->add_option("--device", flags->device, "Where the model runs and matrices are multiplied: cpu, cuda, cuda:N (in f32), or ref")
      ->type_name("NAME")
      ->default_str(flags->device);
  command->add_option("-t,--threads", flags->threads, "Threads; 0: one per core")
      ->type_name("N")
      ->check(number_between(0, 4096))
      ->default_str("0");
  command->add_flag("--json", flags->json, "Print the report as JSON");
  command->add_flag("--force", flags->force, "Replace a file that is there already");
  command->add_flag("-q,--quiet", flags->quiet, "Print nothing");
  command->callback([flags, &context] { context.action = [flags] { return quantize(*flags); }; });
}

}  // namespace cachalot
