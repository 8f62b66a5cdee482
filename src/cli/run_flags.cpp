// Declares the shared flags and turns them into options.
#include "cli/run_flags.h"

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <random>

#include "base/error.h"
#include "base/json.h"

namespace cachalot {
namespace {

constexpr float kDefaultTemperature = 0.8f, kDefaultTopP = 0.95f;

TokenBias parse_bias(const std::string& text, int vocab) {
  const size_t equals = text.find_first_of("=:");
  int token = -1;
  if (equals != std::string::npos) std::from_chars(text.data(), text.data() + equals, token);
  if (token < 0 || token >= vocab || std::to_string(token).size() != equals)
    fail("--logit-bias: found \"{}\", expected ID=BIAS with an id of 0 to {}", printable(text), vocab - 1);
  const std::string number = text.substr(equals + 1);
  char* end = nullptr;
  const float bias = std::strtof(number.c_str(), &end);
  const bool forbids = bias == -HUGE_VALF;
  if (number.empty() || *end != '\0' || (!std::isfinite(bias) && !forbids))
    fail("--logit-bias: found \"{}\", expected ID=BIAS with a number or -inf", printable(text));
  return {token, bias};
}

// A sampling default that the model's authors chose.
std::optional<double> from_config(const JsonValue& root, const char* key, double low, double high) {
  const auto value = root.find(key);
  if (!value) return {};
  const double number = value->number();
  if (!(number >= low && number <= high)) fail("{}: found {}, expected {} to {}", value->where(), number, low, high);
  return number;
}

uint64_t fresh_seed() {
  std::random_device device;
  return device() & 0x7fffffffu;  // short enough to type
}

}  // namespace

CLI::Validator number_between(double low, double high) {
  return CLI::Validator(
      [low, high](std::string& text) {
        char* end = nullptr;
        const double value = std::strtod(text.c_str(), &end);
        const bool good = !text.empty() && *end == '\0' && value >= low && value <= high;
        return good ? std::string() : fmt::format("found {}, expected a number from {} to {}", text, low, high);
      },
      "", "number");
}

ModelOptions ModelFlags::options() const {
  const Numa placement = numa == "distribute" ? Numa::distribute : numa == "isolate" ? Numa::isolate : Numa::none;
  return {.path = model,
          .tokenizer = tokenizer,
          .device = device,
          .n_threads = threads,
          .pin = pin,
          .numa = placement,
          .n_cpu_experts = n_cpu_experts,
          .max_context = max_model_len};
}

void add_model_flags(CLI::App& command, ModelFlags& flags) {
  const char* group = "Model";
  command.add_option("-m,--model", flags.model, "GGUF file, or directory (or file) of safetensors")
      ->type_name("PATH")
      ->required()
      ->group(group);
  add_device_flags(command, flags);
}

void add_model_flags_or_argument(CLI::App& command, ModelFlags& flags) {
  add_model_flags(command, flags);
  command.add_option("model", flags.model_argument, "The same as --model")->type_name("PATH");
  command.get_option("--model")->required(false);
}

void choose_model(const CLI::App& command, ModelFlags& flags) {
  if (!flags.model_argument.empty()) {
    const char* variable = std::getenv(command.get_option("--model")->get_envname().c_str());
    if (!flags.model.empty() && (variable == nullptr || flags.model != variable))
      throw CLI::ValidationError(
          fmt::format("found \"{}\" beside --model; a text of several words needs quotes", printable(flags.model_argument)));
    flags.model = flags.model_argument;
  }
  if (flags.model.empty()) throw CLI::RequiredError(fmt::format("a model ({} MODEL, or --model)", command.get_name()));
}

void add_device_flags(CLI::App& command, ModelFlags& flags) {
  const char* group = "Model";
  command.add_option("--tokenizer", flags.tokenizer, "Take the tokenizer from here: tokenizer.json, directory, or GGUF file")
      ->type_name("PATH")
      ->group(group);
  command.add_option("--device", flags.device, "cpu, cuda, cuda:N, or ref (slow, exact)")
      ->type_name("NAME")
      ->default_str(flags.device)
      ->group(group);
  command.add_option("-t,--threads", flags.threads, "CPU threads; 0: one per physical core")
      ->type_name("N")
      ->check(number_between(0, 1024))
      ->group(group);
  command.add_flag("--pin,--cpu-strict", flags.pin, "A CPU of its own for each CPU thread")->group(group);
  command.add_option("--numa", flags.numa, "Threads and memory on several NUMA nodes: none, distribute (over all), isolate (on one)")
      ->type_name("HOW")
      ->check(CLI::IsMember({"none", "distribute", "isolate"}).description(""))
      ->default_str(flags.numa)
      ->group(group);
  constexpr int kAllLayers = 1000000;
  command
      .add_option("--cpu-experts,--n-cpu-moe", flags.n_cpu_experts,
                  "On a GPU: the routed experts of the first N layers stay in the CPU's memory and are computed there")
      ->type_name("N")
      ->check(number_between(0, kAllLayers))
      ->group(group);
  command
      .add_flag_callback(
          "--cpu-moe", [&flags] { flags.n_cpu_experts = kAllLayers; }, "The same for all layers")
      ->group(group);
}

void add_kv_flags(CLI::App& command, ModelFlags& flags) {
  const char* group = "Context";
  command.add_option("--kv-cache-dtype", flags.kv_cache_dtype, "Numbers in the KV cache: auto, f32, f16, bf16, fp8 (MLA only)")
      ->type_name("TYPE")
      ->check(CLI::IsMember({"auto", "f32", "f16", "bf16", "fp8"}).description(""))
      ->default_str(flags.kv_cache_dtype)
      ->group(group);
  command.add_option("--block-size", flags.block_size, "Tokens of a KV page: 8, 16, 32, 64")
      ->type_name("N")
      ->check(CLI::IsMember({8, 16, 32, 64}).description(""))
      ->default_str("16")
      ->group(group);
}

void add_cache_flags(CLI::App& command, ModelFlags& flags) {
  const char* group = "Context";
  command.add_option("-c,--max-model-len,--ctx-size", flags.max_model_len, "Context in tokens [the model's limit, at most 4096]")
      ->type_name("N")
      ->check(number_between(1, 1 << 26))
      ->group(group);
  add_kv_flags(command, flags);
  command.add_option("--gpu-memory-utilization", flags.memory_utilization, "Share of a GPU's memory to use, weights included")
      ->type_name("X")
      ->check(number_between(0.01, 1.0))
      ->default_str("0.9")
      ->group(group);
  command.add_option("--prefill-chunk,--ubatch-size", flags.prefill_chunk, "Prompt tokens read per step")
      ->type_name("N")
      ->check(number_between(1, 1 << 16))
      ->default_str("512")
      ->group(group);
}

EngineOptions engine_options(const ModelFlags& flags, const LoadedModel& model) {
  return {.max_context = model.max_context,
          .max_requests = 1,
          .max_step_tokens = std::min(flags.prefill_chunk, model.max_context),
          .block_tokens = flags.block_size,
          .memory_utilization = flags.memory_utilization,
          .kv_cache_dtype = flags.kv_cache_dtype};
}

void add_sampling_flags(CLI::App& command, SamplingFlags& flags) {
  const char* group = "Sampling";
  const auto number = [&](const char* names, auto& value, const char* help, double low, double high) {
    command.add_option(names, value, help)->type_name("X")->check(number_between(low, high))->group(group);
  };
  number("--temp,--temperature", flags.temperature, "0: always the likeliest token [the model's, else 0.8]", 0.0, 100.0);
  number("--top-k", flags.top_k, "Only the K likeliest; 0: off [the model's, else 0]", 0, 1 << 30);
  number("--top-p", flags.top_p, "The fewest tokens with this probability together [the model's, else 0.95]", 0.0, 1.0);
  number("--min-p", flags.min_p, "No token less likely than this share of the likeliest [0]", 0.0, 1.0);
  number("--repeat-penalty,--repetition-penalty", flags.repetition_penalty, "Above 1: seen tokens become less likely [1]", 0.01, 100.0);
  number("--presence-penalty", flags.presence_penalty, "Taken off the logit of each token generated before [0]", -100.0, 100.0);
  number("--frequency-penalty", flags.frequency_penalty, "Taken off once per time it was generated [0]", -100.0, 100.0);
  command.add_option("-s,--seed", flags.seed, "Equal seeds give equal text; -1: a new one")
      ->type_name("N")
      ->check(number_between(-1, 9e15))
      ->group(group);
  command.add_option("--logit-bias", flags.logit_bias, "ID=BIAS, added to a token's logit; -inf forbids it; repeatable")
      ->type_name("ID=B")
      ->take_all()
      ->allow_extra_args(false)
      ->group(group);
  command.add_option("-n,--max-tokens,--n-predict", flags.max_tokens, "Longest answer; -1: until the context is full [-1]")
      ->type_name("N")
      ->check(number_between(-1, 1 << 26))
      ->group(group);
  command.add_option("--stop", flags.stop, "Text that ends the answer and is not shown; repeatable")
      ->type_name("TEXT")
      ->take_all()
      ->allow_extra_args(false)
      ->group(group);
  command.add_flag("--ignore-eos", flags.ignore_eos, "Go on past the model's end tokens")->group(group);
  command.add_option("--logprobs", flags.logprobs, "Also log probabilities: of each token and its N likeliest rivals")
      ->type_name("N")
      ->check(number_between(0, 100))
      ->group(group);
}

SamplingOptions sampling_options(const SamplingFlags& flags, const LoadedModel& model) {
  SamplingOptions s;
  s.temperature = kDefaultTemperature;
  s.top_p = kDefaultTopP;
  if (!model.generation_config_json.empty()) {
    const JsonDocument document = JsonDocument::parse(model.generation_config_json, model.path + "/generation_config.json");
    const JsonValue& root = document.root();
    s.temperature = static_cast<float>(from_config(root, "temperature", 0.0, 100.0).value_or(s.temperature));
    s.top_p = static_cast<float>(from_config(root, "top_p", 0.0, 1.0).value_or(s.top_p));
    s.top_k = static_cast<int>(from_config(root, "top_k", 0.0, 1e9).value_or(s.top_k));
    s.min_p = static_cast<float>(from_config(root, "min_p", 0.0, 1.0).value_or(s.min_p));
    s.repetition = static_cast<float>(from_config(root, "repetition_penalty", 0.01, 100.0).value_or(s.repetition));
  }
  s.temperature = flags.temperature.value_or(s.temperature);
  s.top_p = flags.top_p.value_or(s.top_p);
  s.top_k = flags.top_k.value_or(s.top_k);
  s.min_p = flags.min_p.value_or(s.min_p);
  s.repetition = flags.repetition_penalty.value_or(s.repetition);
  s.presence = flags.presence_penalty;
  s.frequency = flags.frequency_penalty;
  s.seed = flags.seed < 0 ? fresh_seed() : static_cast<uint64_t>(flags.seed);
  for (const std::string& text : flags.logit_bias) s.bias.push_back(parse_bias(text, model.config.vocab));
  s.n_logprobs = flags.logprobs;
  return s;
}

}  // namespace cachalot
