// cachalot bench: the speed of a model as llama-bench tells it, and of single operations.
#include <fmt/format.h>

#include <charconv>
#include <optional>

#include "base/error.h"
#include "base/thread_pool.h"
#include "cli/bench_ops.h"
#include "cli/bench_output.h"
#include "cli/commands.h"
#include "cli/process.h"
#include "cli/run_flags.h"
#include "cli/text_units.h"
#include "runtime/engine.h"

namespace cachalot {
namespace {

constexpr int kMostTokens = 1 << 20, kMostSequences = 4096;

// "512,1024" as numbers of [low, high].
std::vector<int> numbers_of(const std::string& flag, const std::string& text, int low, int high) {
  std::vector<int> out;
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    int value = 0;
    const auto [end, problem] = std::from_chars(text.data() + at, text.data() + comma, value);
    if (problem != std::errc() || end != text.data() + comma || value < low || value > high)
      throw CLI::ValidationError(
          fmt::format("{}: found \"{}\", expected whole numbers from {} to {} with commas between", flag, printable(text), low, high));
    out.push_back(value);
    at = comma + 1;
  }
  return out;
}

struct BenchFlags {
  ModelFlags model;
  std::string prompts = "512", gens = "128", depths = "0", batches = "2048", ubatches = "512", sequences = "1", threads = "0",
              output = "md";
  std::vector<std::string> pairs;
  int repetitions = 5;
  int64_t seed = 42;
  bool no_warm_up = false, quiet = false;
};

struct BenchPlan {
  std::vector<BenchTest> tests;
  std::vector<int> threads;
};

// Every test at every depth and size of batch; more than one sequence only where tokens are generated.
BenchPlan plan_of(const BenchFlags& flags) {
  BenchPlan plan;
  const auto prompts = numbers_of("-p", flags.prompts, 0, kMostTokens), gens = numbers_of("-n", flags.gens, 0, kMostTokens),
             sequences = numbers_of("-npl", flags.sequences, 1, kMostSequences);
  std::vector<BenchTest> shapes;
  for (const int n : prompts)
    if (n > 0) shapes.push_back({.n_prompt = n});
  for (const int n : gens)
    for (const int s : sequences)
      if (n > 0) shapes.push_back({.n_gen = n, .n_seqs = s});
  for (const std::string& pair : flags.pairs) {
    const auto both = numbers_of("-pg", pair, 1, kMostTokens);
    if (both.size() != 2) throw CLI::ValidationError(fmt::format("-pg: found \"{}\", expected PROMPT,GENERATED", printable(pair)));
    shapes.push_back({.n_prompt = both[0], .n_gen = both[1]});
  }
  for (const int batch : numbers_of("-b", flags.batches, 1, kMostTokens))
    for (const int ubatch : numbers_of("-ub", flags.ubatches, 1, kMostTokens))
      for (const int depth : numbers_of("-d", flags.depths, 0, kMostTokens))
        for (BenchTest test : shapes) {
          test.n_batch = batch;
          test.n_ubatch = ubatch;
          test.n_depth = depth;
          plan.tests.push_back(test);
        }
  if (plan.tests.empty()) throw CLI::ValidationError("-p, -n: nothing to test, expected one of them above 0, or -pg");
  plan.threads = numbers_of("-t", flags.threads, 0, 1024);
  return plan;
}

int longest(const BenchPlan& plan) {
  int most = 0;
  for (const BenchTest& test : plan.tests) most = std::max(most, test.positions());
  return most;
}

BenchFormat format_of(const std::string& name) {
  return name == "md"      ? BenchFormat::markdown
         : name == "json"  ? BenchFormat::json
         : name == "jsonl" ? BenchFormat::json_lines
                           : BenchFormat::csv;
}

void tell(const BenchFlags& flags, const std::string& text) {
  if (!flags.quiet) fmt::print(stderr, "{}\n", text);
}

void bench_with_threads(const BenchFlags& flags, const BenchPlan& plan, int n_threads, BenchOutput& output) {
  ModelOptions options = flags.model.options();
  options.n_threads = n_threads > 0 ? n_threads : physical_cores();
  options.max_context = longest(plan);
  options.needs_tokenizer = false;
  options.show_progress = !flags.quiet;
  StoredWeights stored;
  options.on_linear = [&](std::span<const LinearSource> sources, const Linear& w) { stored.add(sources, w); };
  const LoadedModel model = load_model(options);
  const KvFormat kv_format = kv_format_of(flags.model.kv_cache_dtype, *model.ops);
  const KvLayout layout = model.config.kv_layout(kv_format, flags.model.block_size);
  const ModelCost cost(model.decoder, stored, static_cast<double>(layout.token_bytes()) * model.config.n_layers);
  const BenchSubject subject{.file = model.path,
                             .type = fmt::format("{} {} {}", model.config.architecture, count_text(cost.params()), stored.main_format()),
                             .device = model.ops->name(),
                             .stored_bytes = cost.stored_bytes(),
                             .params = cost.params(),
                             .n_threads = options.n_threads,
                             .kv_type = name_of(kv_format),
                             .peaks = measure_peaks(*model.ops, options.n_threads)};
  tell(flags, fmt::format("{}, {} threads: {}; loaded in {}", subject.device, subject.n_threads, subject.peaks.text(),
                          seconds_text(model.load_seconds)));
  const BenchSettings settings{.kv_format = kv_format,
                               .block_tokens = flags.model.block_size,
                               .repetitions = flags.repetitions,
                               .warm_up = !flags.no_warm_up,
                               .seed = static_cast<uint64_t>(flags.seed)};
  for (const BenchTest& test : plan.tests)
    output.add(subject, run_bench_test(*model.ops, model.decoder, cost, subject.peaks, test, settings));
}

int bench(const BenchFlags& flags, const BenchPlan& plan) {
  const Config config = read_config(*Checkpoint::open(flags.model.model, PackedModels::accept));
  if (longest(plan) > config.max_positions)
    fail("-p, -n, -d: a test takes {} positions, expected at most {}, the model's limit", longest(plan), config.max_positions);
  BenchOutput output(format_of(flags.output));
  for (const int n_threads : plan.threads) bench_with_threads(flags, plan, n_threads, output);
  output.finish();
  return kExitOk;
}

struct OpsFlags {
  std::string filter, device = "cpu";
  int threads = 0;
  bool test_sizes = false;
};

int bench_operations(const OpsFlags& flags) {
  const int n_threads = flags.threads > 0 ? flags.threads : physical_cores();
  const auto ops = make_ops(flags.device, {.n_threads = n_threads});
  const auto cases = chosen_cases(flags.test_sizes ? test::op_cases() : bench_cases(), flags.filter);
  if (cases.empty()) fail("no operation has \"{}\" in its name", printable(flags.filter));
  const MachinePeaks peaks = measure_peaks(*ops, n_threads);
  fmt::print(stderr, "{}, {} threads: {}\n", ops->name(), n_threads, peaks.text());
  print_op_table(*ops, peaks, cases);
  return kExitOk;
}

void add_ops_command(CLI::App& bench, Context& context) {
  CLI::App* command = bench.add_subcommand("ops", "Time of each operation, GB/s, TFLOP/s, and shares of the machine's peaks");
  auto flags = std::make_shared<OpsFlags>();
  command->add_option("filter", flags->filter, "Only operations with this in their name")->type_name("PART OF A NAME");
  command->add_option("--device", flags->device, "cpu, cuda, cuda:N, or ref (slow, exact)")->type_name("NAME")->default_str(flags->device);
  command->add_option("-t,--threads", flags->threads, "CPU threads; 0: one per physical core")
      ->type_name("N")
      ->check(number_between(0, 1024));
  command->add_flag("--test-sizes", flags->test_sizes, "The small odd sizes that the tests run, instead of those of real models");
  command->callback([flags, &context] { context.action = [flags] { return bench_operations(*flags); }; });
}

}  // namespace

void add_bench_command(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand("bench", "Speed of a model, with its share of what the machine can do");
  command->require_subcommand(0, 1);
  command->footer(
      "Flags and columns are llama-bench's; several values of a flag are written with commas between. The prompt is random tokens.\n"
      "GB/s and TFLOP/s count what the model must read and compute; peaks are measured at the start. Examples:\n"
      "  cachalot bench -m model.gguf\n"
      "  cachalot bench -m model.gguf -p 0 -n 64 -d 0,4096 -npl 1,4,8,16 -o json\n"
      "  cachalot bench ops linear/q4_k");
  auto flags = std::make_shared<BenchFlags>();
  command->add_option("-m,--model", flags->model.model, "GGUF file, or directory (or file) of safetensors")->type_name("PATH");
  command->add_option("--device", flags->model.device, "cpu, cuda, cuda:N, or ref (slow, exact)")
      ->type_name("NAME")
      ->default_str(flags->model.device);
  const auto list = [&](const char* names, std::string& value, const char* help) {
    command->add_option(names, value, help)->type_name("N,..")->default_str(value);
  };
  list("-t,--threads", flags->threads, "CPU threads; 0: one per physical core");
  list("-p,--n-prompt", flags->prompts, "Test reading so many tokens; 0: not");
  list("-n,--n-gen", flags->gens, "Test generating so many tokens; 0: not");
  command->add_option("--pg", flags->pairs, "Test reading, then generating; also -pg; repeatable")
      ->type_name("P,N")
      ->take_all()
      ->allow_extra_args(false);
  list("-d,--n-depth", flags->depths, "Tokens in the cache before each test");
  list("--npl", flags->sequences, "Sequences that generate at the same time; also -npl");
  list("-b,--batch-size", flags->batches, "Tokens of a step, at most");
  list("--ub,--ubatch-size", flags->ubatches, "Tokens of a step, at most; also -ub");
  command->add_option("-r,--repetitions", flags->repetitions, "Runs of each test")
      ->type_name("N")
      ->check(number_between(1, 10000))
      ->default_str("5");
  add_kv_flags(*command, flags->model);
  command->add_option("-s,--seed", flags->seed, "Of the random tokens")->type_name("N")->check(number_between(0, 9e15))->default_str("42");
  command->add_flag("--no-warmup", flags->no_warm_up, "No untimed run before each test");
  command->add_option("-o,--output", flags->output, "md, json, jsonl or csv")
      ->type_name("FORM")
      ->check(CLI::IsMember({"md", "json", "jsonl", "csv"}).description(""))
      ->default_str(flags->output);
  command->add_flag("-q,--quiet", flags->quiet, "No peaks and no progress on the standard error");
  // Each subcommand is a benchmark of its own; without one the flags above apply.
  add_ops_command(*command, context);
  add_engine_benchmarks(*command, context);
  command->callback([flags, command, &context] {
    if (!command->get_subcommands().empty()) return;
    if (flags->model.model.empty()) throw CLI::RequiredError("--model");
    context.action = [flags, plan = plan_of(*flags)] { return bench(*flags, plan); };
  });
}

}  // namespace cachalot
