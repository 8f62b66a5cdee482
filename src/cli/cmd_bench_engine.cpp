// cachalot bench throughput | latency | sweep: the engine under load, on one loaded model.
#include <fmt/format.h>

#include <charconv>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cli/bench_traffic.h"
#include "cli/commands.h"
#include "cli/engine_flags.h"
#include "cli/open_engine.h"
#include "cli/process.h"
#include "cli/read_file.h"
#include "io/atomic_file.h"

namespace cachalot {
namespace {

struct LoadFlags {
  ModelFlags model;
  EngineFlags engine;
  TrafficOptions load;
  std::string rates = "1,2,4", mix = "1,0,0", output = "md", picture;
  double target_first_token_ms = 0.0, target_token_gap_ms = 0.0;
  // sweep: lists
  std::string block_sizes, max_num_seqs, batched_tokens, cache_dtypes;
};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> out;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    if (end > begin) out.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return out;
}

std::vector<double> numbers(const std::string& text, const char* flag, double low, double high) {
  std::vector<double> out;
  for (const std::string& word : split(text)) {
    char* end = nullptr;
    out.push_back(std::strtod(word.c_str(), &end));
    if (*end != '\0' || !(out.back() >= low && out.back() <= high))
      fail("{}: found \"{}\", expected numbers of {} to {}", flag, printable(word), low, high);
  }
  return out;
}

struct Row {
  std::string name;
  nlohmann::ordered_json settings = nlohmann::ordered_json::object();
  TrafficResult result;
};

nlohmann::ordered_json to_json(const Row& row) {
  nlohmann::ordered_json out{{"name", row.name}};
  out.update(row.settings);
  const TrafficResult& r = row.result;
  out.update({{"seconds", r.seconds},
              {"prompt_tokens", r.prompt_tokens},
              {"cached_tokens", r.cached_tokens},
              {"output_tokens", r.output_tokens},
              {"output_tokens_per_second", static_cast<double>(r.output_tokens) / r.seconds},
              {"total_tokens_per_second", static_cast<double>(r.output_tokens + r.prompt_tokens) / r.seconds}});
  auto classes = nlohmann::ordered_json::object();
  for (int c = 0; c < kPriorities; ++c) {
    const ClassTraffic& load = r.classes[static_cast<size_t>(c)];
    if (load.n_finished + load.n_failed == 0) continue;
    nlohmann::ordered_json one{{"finished", load.n_finished}, {"failed", load.n_failed}};
    for (const auto& [name, values] : {std::pair{"first_token_ms", &load.first_token}, {"token_gap_ms", &load.gaps}})
      one[name] = {{"p50", 1e3 * quantile(*values, 0.5)}, {"p90", 1e3 * quantile(*values, 0.9)}, {"p99", 1e3 * quantile(*values, 0.99)}};
    classes[fmt::format("P{}", c)] = std::move(one);
  }
  out["classes"] = std::move(classes);
  return out;
}

class Table {
 public:
  explicit Table(const LoadFlags& flags) : flags_(flags) {
    if (flags.output != "md") return;
    write_out(
        "| settings | class | requests | failed | output tokens/s | first token p50 / p90 / p99, ms | gap p50 / p90 / p99, ms |\n| --- | "
        "--- | ---: | ---: | ---: | ---: | ---: |\n");
  }
  void add(Row row) {
    if (flags_.output == "md") {
      bool first = true;
      for (int c = 0; c < kPriorities; ++c) {
        const ClassTraffic& load = row.result.classes[static_cast<size_t>(c)];
        if (load.n_finished + load.n_failed == 0) continue;
        const auto three = [](const std::vector<double>& v) {
          return fmt::format("{:.1f} / {:.1f} / {:.1f}", 1e3 * quantile(v, 0.5), 1e3 * quantile(v, 0.9), 1e3 * quantile(v, 0.99));
        };
        const std::string speed = first ? fmt::format("{:.1f}", static_cast<double>(row.result.output_tokens) / row.result.seconds) : "";
        write_out(fmt::format("| {} | P{} | {} | {} | {} | {} | {} |\n", first ? row.name : "", c, load.n_finished, load.n_failed, speed,
                              three(load.first_token), three(load.gaps)));
        first = false;
      }
    } else if (flags_.output == "jsonl") {
      write_out(to_json(row).dump() + "\n");
    }
    rows_.push_back(std::move(row));
  }
  void finish() const {
    if (flags_.output == "json") {
      auto list = nlohmann::ordered_json::array();
      for (const Row& row : rows_) list.push_back(to_json(row));
      write_out(list.dump(2) + "\n");
    }
    if (flags_.picture.empty()) return;
    std::vector<TrafficPoint> points;
    for (const Row& row : rows_)
      points.push_back(
          {row.name, static_cast<double>(row.result.output_tokens) / row.result.seconds, quantile(row.result.all().gaps, 0.5)});
    write_atomically(flags_.picture,
                     traffic_picture(points, fmt::format("{} prompt and {} output tokens", flags_.load.n_prompt, flags_.load.n_output),
                                     "gap between tokens, median"));
  }

 private:
  const LoadFlags& flags_;
  std::vector<Row> rows_;
};

// One engine after the other on one loaded model.
class Bench {
 public:
  explicit Bench(LoadFlags& flags) : flags_(flags) {
    const std::vector<double> mix = numbers(flags.mix, "--mix", 0.0, 1e9);
    if (mix.size() != kPriorities || mix[0] + mix[1] + mix[2] <= 0.0)
      fail("--mix: found \"{}\", expected three shares, as 1,1,1", printable(flags.mix));
    std::copy(mix.begin(), mix.end(), flags_.load.mix.begin());
    if (flags_.load.n_shared > flags_.load.n_prompt)
      fail("--shared-prefix: found {}, expected at most the {} tokens of the prompt", flags_.load.n_shared, flags_.load.n_prompt);
    // The context that these requests need, no more.
    if (flags_.model.max_model_len == 0) flags_.model.max_model_len = flags_.load.n_prompt + flags_.load.n_output + 1;
    model_ = std::make_shared<LoadedModel>(load_model(model_options(flags_.model, flags_.engine)));
  }

  Row run(const std::string& name, nlohmann::ordered_json settings, const TrafficOptions& load) {
    EngineOptions options = many_requests(flags_.model, flags_.engine);
    options.max_context = flags_.model.max_model_len;
    options.targets[0].first_token_seconds = 1e-3 * flags_.target_first_token_ms;
    options.targets[0].token_gap_seconds = 1e-3 * flags_.target_token_gap_ms;
    for (ClassTargets& t : options.targets) t.max_waiting = load.n_requests;
    const auto engine = make_engine(model_, options);
    TrafficOptions warm_up = load;
    warm_up.n_requests = 1;
    warm_up.n_output = 2;
    warm_up.rate = 0.0;
    warm_up.seed = load.seed + 1;
    run_traffic(*engine, warm_up);
    return {name, std::move(settings), run_traffic(*engine, load)};
  }

 private:
  LoadFlags& flags_;
  std::shared_ptr<LoadedModel> model_;
};

int throughput(LoadFlags& flags) {
  Bench bench(flags);
  Table table(flags);
  table.add(bench.run(fmt::format("{} at once", flags.load.n_requests), nlohmann::ordered_json::object(), flags.load));
  table.finish();
  return kExitOk;
}

int latency(LoadFlags& flags) {
  const std::vector<double> rates = numbers(flags.rates, "--rates", 1e-6, 1e9);
  if (rates.empty()) fail("--rates: expected at least one");
  Bench bench(flags);
  Table table(flags);
  for (const double rate : rates) {
    TrafficOptions load = flags.load;
    load.rate = rate;
    table.add(bench.run(fmt::format("{:g} requests/s", rate), {{"requests_per_second", rate}}, load));
  }
  table.finish();
  return kExitOk;
}

int sweep(LoadFlags& flags) {
  // Each list multiplies the settings.
  std::vector<nlohmann::ordered_json> grid{nlohmann::ordered_json::object()};
  const auto multiply = [&](const char* name, const std::vector<std::string>& values) {
    if (values.empty()) return;
    std::vector<nlohmann::ordered_json> out;
    for (const auto& setting : grid)
      for (const std::string& value : values) {
        auto next = setting;
        next[name] = value;
        out.push_back(std::move(next));
      }
    grid = std::move(out);
  };
  numbers(flags.block_sizes, "--block-size", 8, 64);
  numbers(flags.max_num_seqs, "--max-num-seqs", 1, 4096);
  numbers(flags.batched_tokens, "--max-num-batched-tokens", 1, 1 << 16);
  multiply("block-size", split(flags.block_sizes));
  multiply("max-num-seqs", split(flags.max_num_seqs));
  multiply("max-num-batched-tokens", split(flags.batched_tokens));
  multiply("kv-cache-dtype", split(flags.cache_dtypes));
  Bench bench(flags);
  Table table(flags);
  for (const auto& setting : grid) {
    std::string name;
    for (const auto& [key, value] : setting.items()) {
      const std::string text = value.get<std::string>();
      name += (name.empty() ? "" : " ") + key + " " + text;
      if (key == "block-size") flags.model.block_size = std::stoi(text);
      if (key == "max-num-seqs") flags.engine.max_num_seqs = std::stoi(text);
      if (key == "max-num-batched-tokens") flags.engine.max_num_batched_tokens = std::stoi(text);
      if (key == "kv-cache-dtype") flags.model.kv_cache_dtype = text;
    }
    table.add(bench.run(name.empty() ? "as given" : name, setting, flags.load));
  }
  table.finish();
  return kExitOk;
}

void add_load_flags(CLI::App& command, LoadFlags& f) {
  add_model_flags(command, f.model);
  const char* group = "Load";
  const auto count = [&](const char* name, int& value, const char* help, double low) {
    command.add_option(name, value, help)
        ->type_name("N")
        ->check(number_between(low, 1 << 24))
        ->default_str(std::to_string(value))
        ->group(group);
  };
  count("--num-prompts,--requests", f.load.n_requests, "Requests", 1);
  count("--input-len,-p", f.load.n_prompt, "Tokens of a prompt", 1);
  count("--output-len,-n", f.load.n_output, "Tokens of an answer", 1);
  count("--shared-prefix", f.load.n_shared, "Tokens that all prompts begin with", 0);
  command.add_option("--mix", f.mix, "Shares of the classes P0, P1, P2")->type_name("A,B,C")->default_str(f.mix)->group(group);
  command.add_option("-s,--seed", f.load.seed, "Of tokens and arrivals")->type_name("N")->default_str("42")->group(group);
  command.add_option("--target-ttft-ms", f.target_first_token_ms, "First token of class P0 within; 0: no target")
      ->type_name("MS")
      ->check(number_between(0, 1e9))
      ->group(group);
  command.add_option("--target-itl-ms", f.target_token_gap_ms, "Next token of class P0 within; 0: no target")
      ->type_name("MS")
      ->check(number_between(0, 1e9))
      ->group(group);
  command.add_option("-o,--output", f.output, "md, json or jsonl")
      ->type_name("FORM")
      ->check(CLI::IsMember({"md", "json", "jsonl"}).description(""))
      ->default_str(f.output)
      ->group("Output");
  command.add_option("--svg", f.picture, "Draw throughput and latency here")->type_name("PATH")->group("Output");
}

CLI::App* add_one(CLI::App& bench, Context& context, const char* name, const char* help, int (*run)(LoadFlags&),
                  const std::shared_ptr<LoadFlags>& flags) {
  CLI::App* command = bench.add_subcommand(name, help);
  add_load_flags(*command, *flags);
  command->callback([flags, run, &context] { context.action = [flags, run] { return run(*flags); }; });
  return command;
}

}  // namespace

void add_engine_benchmarks(CLI::App& bench, Context& context) {
  {
    auto flags = std::make_shared<LoadFlags>();
    CLI::App* command = add_one(bench, context, "throughput", "All requests at once: how many tokens a second", throughput, flags);
    add_engine_flags(*command, flags->engine);
    add_cache_flags(*command, flags->model);
  }
  {
    auto flags = std::make_shared<LoadFlags>();
    CLI::App* command = add_one(bench, context, "latency", "Requests arriving at random: how long they wait, by class", latency, flags);
    command->add_option("--rates,--request-rate", flags->rates, "Arrivals a second, one run each")
        ->type_name("R,..")
        ->default_str(flags->rates)
        ->group("Load");
    add_engine_flags(*command, flags->engine);
    add_cache_flags(*command, flags->model);
  }
  auto flags = std::make_shared<LoadFlags>();
  CLI::App* command = add_one(bench, context, "sweep", "The throughput of each combination of settings", sweep, flags);
  command->footer(
      "Lists with commas between; each combination is run. Example:\n  cachalot bench sweep -m model.gguf --block-size 8,16,32,64 "
      "--max-num-seqs 1,4,16 --svg sweep.svg");
  const auto list = [&](const char* name, std::string& value, const char* help) {
    command->add_option(name, value, help)->type_name("N,..")->group("Settings");
  };
  list("--block-size", flags->block_sizes, "Tokens of a KV page: 8, 16, 32, 64");
  list("--max-num-seqs,--parallel", flags->max_num_seqs, "Requests running at the same time");
  list("--max-num-batched-tokens,--batch-size", flags->batched_tokens, "Rows of a step");
  list("--kv-cache-dtype", flags->cache_dtypes, "Numbers in the KV cache: auto, f32, f16, bf16, fp8");
}

}  // namespace cachalot
