// Fields that all endpoints share.
#include "server/parse_common.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>

namespace cachalot::server {
namespace {

constexpr double kMaxTemperature = 100.0;
constexpr int64_t kAnyInteger = std::numeric_limits<int64_t>::max();

Priority parse_priority(const Field& field) {
  if (field.is_number()) {
    // As vLLM counts: lower is earlier, 0 is usual. Ours has three classes.
    const int64_t number = field.integer(std::numeric_limits<int64_t>::min(), kAnyInteger);
    return number <= 0 ? Priority::interactive : number == 1 ? Priority::batch : Priority::best_effort;
  }
  const std::string_view text = field.is_string() ? field.string() : "";
  if (text == "P0" || text == "p0" || text == "interactive") return Priority::interactive;
  if (text == "P1" || text == "p1" || text == "batch") return Priority::batch;
  if (text == "P2" || text == "p2" || text == "best_effort") return Priority::best_effort;
  field.refuse("P0, P1, P2, interactive, batch, best_effort or an integer");
}

void add_bias(std::vector<TokenBias>& out, const Field& where, int64_t id, double bias, int vocab) {
  if (id < 0 || id >= vocab) where.refuse_text(fmt::format("found token {}, expected 0 to {}", id, vocab - 1));
  // OpenAI: -100 bans a token.
  out.push_back({static_cast<int>(id), bias <= -100.0 ? -HUGE_VALF : static_cast<float>(bias)});
}

// {"id": bias} as OpenAI has it, or llama.cpp's [[id, bias], [id, false]].
std::vector<TokenBias> parse_logit_bias(const Field& field, const ParseContext& context) {
  std::vector<TokenBias> out;
  const auto limit = static_cast<size_t>(context.limits.max_logit_bias);
  if (field.is_array()) {
    size_t i = 0;
    for (const auto element : field.array(limit)) {
      const Field pair = field.item(element, i++);
      const auto parts = pair.array(2);
      if (parts.size() != 2) pair.refuse_text("expected [token id, bias]");
      const Field id = pair.item(parts.at(0).value(), 0), bias = pair.item(parts.at(1).value(), 1);
      const bool ban = bias.is_bool() && !bias.boolean();
      add_bias(out, id, id.integer(0, kAnyInteger), ban ? -100.0 : bias.number(-100, 100), context.vocab);
    }
    return out;
  }
  simdjson::dom::object object;
  if (field.element().get(object) != simdjson::SUCCESS) field.refuse("an object of token ids and biases");
  if (object.size() > limit) field.refuse_text(fmt::format("found {} entries, expected at most {}", object.size(), limit));
  for (const auto [key, value] : object) {
    const Field entry(value, fmt::format("{}.{}", field.path(), key.substr(0, 32)));
    int64_t id = -1;
    const auto read = std::from_chars(key.data(), key.data() + key.size(), id);
    if (read.ec != std::errc() || read.ptr != key.data() + key.size()) entry.refuse_text("the key is no token id");
    add_bias(out, entry, id, entry.number(-100, 100), context.vocab);
  }
  return out;
}

void parse_sampling(const Field& root, const ParseContext& context, CommonParams& out) {
  SamplingOptions& s = out.sampling;
  const auto number = [&](std::string_view key, float& target, double low, double high) {
    if (const auto value = root.number_at(key, low, high)) target = static_cast<float>(*value);
  };
  number("temperature", s.temperature, 0.0, kMaxTemperature);
  number("top_p", s.top_p, 0.0, 1.0);
  number("min_p", s.min_p, 0.0, 1.0);
  number("repeat_penalty", s.repetition, 0.01, 100.0);
  number("repetition_penalty", s.repetition, 0.01, 100.0);
  number("presence_penalty", s.presence, -2.0, 2.0);
  number("frequency_penalty", s.frequency, -2.0, 2.0);
  if (const auto k = root.integer_at("top_k", -1, kAnyInteger)) s.top_k = static_cast<int>(std::min<int64_t>(*k, context.vocab));
  if (const auto field = root.find("seed")) {
    uint64_t seed = 0;
    if (field->element().get(seed) != simdjson::SUCCESS) {
      const int64_t wide = field->integer(std::numeric_limits<int64_t>::min(), kAnyInteger);
      out.has_seed = wide != -1;  // llama.cpp: a random one
      seed = static_cast<uint64_t>(wide);
    } else {
      out.has_seed = true;
    }
    s.seed = seed;
  }
  if (const auto field = root.find("logit_bias")) s.bias = parse_logit_bias(*field, context);
  const auto max_ids = static_cast<size_t>(context.limits.max_token_ids);
  if (const auto field = root.find("stop_token_ids")) out.stop_tokens = parse_token_ids(*field, context.vocab, max_ids);
}

void parse_streaming(const Field& root, CommonParams& out) {
  out.stream = root.boolean_or("stream", false);
  const auto options = root.find("stream_options");
  if (!options) return;
  if (!out.stream) options->refuse_text("only allowed together with \"stream\": true");
  out.include_usage = options->boolean_or("include_usage", false);
  out.continuous_usage = options->boolean_or("continuous_usage_stats", false);
}

}  // namespace

int parse_max_tokens(const Field& root, std::initializer_list<std::string_view> names, int least) {
  for (const std::string_view name : names) {
    const auto field = root.find(name);
    if (!field) continue;
    // More than any context holds is as good as no limit.
    if (double number = 0; field->is_number() && field->element().get(number) == simdjson::SUCCESS && number > 1e9) return -1;
    return static_cast<int>(field->integer(least, 1'000'000'000));
  }
  return -1;
}

std::vector<std::string> parse_stops(const Field& field, const RequestLimits& limits) {
  std::vector<std::string> out;
  const auto add = [&](const Field& item) {
    const std::string_view text = item.string();
    if (text.empty()) item.refuse("a string that is not empty");
    if (text.size() > limits.max_stop_bytes)
      item.refuse_text(fmt::format("found {} bytes, expected at most {}", text.size(), limits.max_stop_bytes));
    out.emplace_back(text);
  };
  if (!field.is_array()) {
    add(field);
    return out;
  }
  size_t i = 0;
  for (const auto element : field.array(static_cast<size_t>(limits.max_stops))) add(field.item(element, i++));
  return out;
}

std::vector<int> parse_token_ids(const Field& field, int vocab, size_t max_size) {
  std::vector<int> out;
  const auto array = field.array(max_size);
  out.reserve(array.size());
  for (const auto element : array) {
    int64_t id = -1;
    if (element.get(id) != simdjson::SUCCESS || id < 0 || id >= vocab)
      field.item(element, out.size()).refuse(fmt::format("a token id from 0 to {}", vocab - 1));
    out.push_back(static_cast<int>(id));
  }
  return out;
}

ConstraintSpec parse_response_format(const Field& format) {
  using Kind = ConstraintSpec::Kind;
  const Field type = format.at("type");
  const std::string_view name = type.string();
  const auto json_text = [](const Field& schema) {
    if (!schema.is_object() && !schema.is_bool()) schema.refuse("a JSON schema (an object)");
    return simdjson::minify(schema.element());
  };
  if (name == "text") return {};
  if (name == "json_object") {
    // llama.cpp lets a schema stand beside it.
    if (const auto schema = format.find("schema")) return {.kind = Kind::json_schema, .text = json_text(*schema)};
    return {.kind = Kind::json_object};
  }
  if (name == "json_schema") {
    const auto wrapped = format.find("json_schema");  // Responses puts "schema" here, chat one level deeper
    const Field schema = (wrapped ? *wrapped : format).at("schema");
    return {.kind = Kind::json_schema, .text = json_text(schema)};
  }
  if (name == "regex" || name == "grammar") {
    auto text = format.find(name == "regex" ? "pattern" : "grammar");
    if (!text) text = format.at("value");
    return {.kind = name == "regex" ? Kind::regex : Kind::grammar, .text = std::string(text->string())};
  }
  type.refuse("text, json_object, json_schema, regex or grammar");
}

ConstraintSpec parse_constraint(const Field& root) {
  using Kind = ConstraintSpec::Kind;
  ConstraintSpec out;
  const auto set = [&](const Field& field, ConstraintSpec spec) {
    if (spec.kind == Kind::none) return;
    if (out.kind != Kind::none) field.refuse_text("the answer can have one wanted shape only");
    out = std::move(spec);
    out.field = field.path();
  };
  const auto choices = [&](const Field& field) {
    ConstraintSpec spec{.kind = Kind::choice};
    size_t i = 0;
    for (const auto element : field.array(4096)) spec.choices.emplace_back(field.item(element, i++).string());
    if (spec.choices.empty()) field.refuse("at least one choice");
    return spec;
  };
  const auto json = [](const Field& field) {
    return ConstraintSpec{.kind = Kind::json_schema,
                          .text = field.is_string() ? std::string(field.string()) : simdjson::minify(field.element())};
  };
  if (const auto field = root.find("response_format")) set(*field, parse_response_format(*field));
  if (const auto field = root.find("grammar")) set(*field, {.kind = Kind::grammar, .text = std::string(field->string())});
  if (const auto field = root.find("json_schema")) set(*field, json(*field));
  const auto nested = root.find("structured_outputs");
  for (const bool guided : {false, true}) {
    if (!guided && !nested) continue;
    const Field& holder = guided ? root : *nested;
    const std::string prefix = guided ? "guided_" : "";
    if (const auto field = holder.find(prefix + "json")) set(*field, json(*field));
    if (const auto field = holder.find(prefix + "regex")) set(*field, {.kind = Kind::regex, .text = std::string(field->string())});
    if (const auto field = holder.find(prefix + "choice")) set(*field, choices(*field));
    if (const auto field = holder.find(prefix + "grammar")) set(*field, {.kind = Kind::grammar, .text = std::string(field->string())});
    if (const auto field = holder.find("structural_tag")) field->refuse_text("not supported");
  }
  return out;
}

CommonParams parse_common(const Field& root, const ParseContext& context) {
  const RequestLimits& limits = context.limits;
  CommonParams out;
  out.sampling = context.defaults;
  parse_sampling(root, context, out);
  parse_streaming(root, out);
  out.n = static_cast<int>(root.integer_at("n", 1, limits.max_n).value_or(1));
  out.min_tokens = static_cast<int>(root.integer_at("min_tokens", 0, 1'000'000'000).value_or(0));
  out.ignore_eos = root.boolean_or("ignore_eos", false);
  out.include_stop = root.boolean_or("include_stop_str_in_output", false);
  out.skip_special_tokens = root.boolean_or("skip_special_tokens", true);
  if (const auto field = root.find("stop")) out.stops = parse_stops(*field, limits);
  if (const auto field = root.find("priority")) {
    out.priority = parse_priority(*field);
  } else if (const std::string tier = root.string_or("service_tier", ""); tier == "flex") {
    out.priority = Priority::batch;
  }
  out.cache_salt = root.string_or("cache_salt", "", limits.max_salt_bytes);
  out.use_prefix_cache = root.boolean_or("cache_prompt", true);
  if (const auto p = root.integer_at("prompt_logprobs", 0, limits.max_logprobs)) out.prompt_logprobs = static_cast<int>(*p);
  out.return_token_ids = root.boolean_or("return_token_ids", false);
  if (const auto field = root.find("chat_template"))
    field->refuse_text("templates are not taken from requests; the server is started with one");
  out.constraint = parse_constraint(root);
  return out;
}

}  // namespace cachalot::server
