// One line to one request. Unknown fields are refused: a misspelt one would change an answer silently.
#include "cli/prompt_file.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/json.h"
#include "text/chat_prompt.h"

namespace cachalot {
namespace {

constexpr size_t kMaxLine = size_t{64} << 20;  // bytes

constexpr std::array kFields = {"id",
                                "custom_id",
                                "method",
                                "url",
                                "prompt",
                                "messages",
                                "model",
                                "max_tokens",
                                "max_completion_tokens",
                                "temperature",
                                "top_p",
                                "top_k",
                                "min_p",
                                "seed",
                                "stop",
                                "ignore_eos",
                                "priority",
                                "cache_salt",
                                "min_tokens",
                                "repetition_penalty",
                                "presence_penalty",
                                "frequency_penalty",
                                "body",
                                "stream",
                                "metadata"};

nlohmann::ordered_json to_json(const JsonValue& v) { return nlohmann::ordered_json::parse(simdjson::minify(v.element())); }

double number_in(const JsonValue& v, double low, double high) {
  const double n = v.number();
  if (!(n >= low && n <= high)) fail("{}: found {}, expected {} to {}", v.where(), n, low, high);
  return n;
}
int integer_in(const JsonValue& v, int64_t low, int64_t high) {
  const int64_t n = v.integer();
  if (n < low || n > high) fail("{}: found {}, expected {} to {}", v.where(), n, low, high);
  return static_cast<int>(n);
}

void read_sampling(const JsonValue& root, PromptLine& out) {
  SamplingOptions& s = out.request.sampling;
  const auto number = [&](const char* key, double low, double high, float& into) {
    if (const auto v = root.find(key)) into = static_cast<float>(number_in(*v, low, high));
  };
  number("temperature", 0.0, 100.0, s.temperature);
  number("top_p", 0.0, 1.0, s.top_p);
  number("min_p", 0.0, 1.0, s.min_p);
  number("repetition_penalty", 0.01, 100.0, s.repetition);
  number("presence_penalty", -100.0, 100.0, s.presence);
  number("frequency_penalty", -100.0, 100.0, s.frequency);
  if (const auto v = root.find("top_k")) s.top_k = integer_in(*v, -1, 1 << 30);
  if (const auto v = root.find("seed")) s.seed = static_cast<uint64_t>(v->integer());
  for (const char* key : {"max_tokens", "max_completion_tokens"})
    if (const auto v = root.find(key)) out.request.max_tokens = integer_in(*v, 0, 1 << 30);
  if (const auto v = root.find("min_tokens")) out.request.min_tokens = integer_in(*v, 0, 1 << 30);
  if (const auto v = root.find("ignore_eos")) out.request.ignore_eos = v->boolean();
  if (const auto v = root.find("cache_salt")) out.request.cache_salt = std::string(v->string());
  if (const auto v = root.find("priority")) {
    const std::string_view name = v->string();
    if (name.size() != 2 || name[0] != 'P' || name[1] < '0' || name[1] > '2')
      fail("{}: found \"{}\", expected P0, P1 or P2", v->where(), printable(name));
    out.request.priority = static_cast<Priority>(name[1] - '0');
  }
  if (const auto v = root.find("stop")) {
    out.stops.clear();
    if (v->is_string()) {
      out.stops.emplace_back(v->string());
    } else {
      for (const auto element : v->array()) out.stops.emplace_back(JsonValue(element, v->where()).string());
    }
    for (const std::string& stop : out.stops)
      if (stop.empty()) fail("{}: a stop string is empty", v->where());
  }
}

}  // namespace

PromptLine read_prompt_line(std::string_view line, size_t number, const PromptDefaults& defaults) {
  const JsonDocument document = JsonDocument::parse(line, fmt::format("line {}", number + 1), {.max_bytes = kMaxLine, .unique_keys = true});
  const JsonValue& top = document.root();
  PromptLine out;
  out.request.sampling = defaults.sampling;
  out.request.sampling.seed += number;
  out.request.max_tokens = defaults.max_tokens;
  out.request.ignore_eos = defaults.ignore_eos;
  out.request.priority = defaults.priority;
  out.stops = defaults.stops;
  for (const char* key : {"id", "custom_id"})
    if (const auto v = top.find(key)) out.id = to_json(*v);
  const auto body = top.find("body");  // of OpenAI's batch files
  const JsonValue& root = body ? *body : top;
  for (const JsonValue* object : {&top, &root})
    for (const auto field : object->object())
      if (std::none_of(kFields.begin(), kFields.end(), [&](std::string_view known) { return known == field.key; }))
        fail("{}: unknown field \"{}\"", object->where(), printable(field.key));
  read_sampling(root, out);

  const auto prompt = root.find("prompt"), messages = root.find("messages");
  if (prompt.has_value() == messages.has_value()) fail("{}: expected either \"prompt\" or \"messages\"", root.where());
  if (messages) {
    if (defaults.chat_template == nullptr) fail("{}: the model has no chat template", messages->where());
    out.request.prompt = make_chat_prompt(defaults.tokenizer, *defaults.chat_template, to_json(*messages)).ids;
  } else if (prompt->is_string()) {
    out.request.prompt = defaults.tokenizer.encode(prompt->string(), {.add_bos = defaults.tokenizer.add_bos(), .parse_special = true});
  } else if (!prompt->is_array()) {
    fail("{}: expected text, or a list of token ids", prompt->where());
  } else {
    for (const auto element : prompt->array())
      out.request.prompt.push_back(integer_in(JsonValue(element, prompt->where()), 0, defaults.tokenizer.size() - 1));
  }
  return out;
}

}  // namespace cachalot
