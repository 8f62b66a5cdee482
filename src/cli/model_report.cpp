// Collects the facts of a checkpoint, and prints them.
#include "cli/model_report.h"

#include <fmt/format.h>

#include <map>

#include "base/error.h"
#include "cli/load_tokenizer.h"
#include "cli/text_units.h"
#include "model/config.h"

namespace cachalot {
namespace {

using Json = nlohmann::ordered_json;

int64_t elements_of(const TensorInfo& tensor) {
  int64_t n = 1;
  for (const int64_t dim : tensor.shape) n *= dim;
  return n;
}

// Numbers that belong to a format or a table, not to the model's parameters.
bool is_parameter(const TensorInfo& tensor) {
  return tensor.weights_each != 0 && tensor.name.find("rope_freqs") == std::string::npos &&
         tensor.name.find("rope_factors") == std::string::npos && tensor.name.find("inv_freq") == std::string::npos;
}

void report_tensors(const Checkpoint& checkpoint, Json& report) {
  struct Sum {
    int64_t tensors = 0, elements = 0, bytes = 0;
  };
  std::map<std::string, Sum> by_type;
  int64_t parameters = 0, bytes = 0;
  Json list = Json::array();
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    const int64_t n = elements_of(tensor), size = static_cast<int64_t>(tensor.data.size());
    Sum& sum = by_type[std::string(tensor.dtype)];
    ++sum.tensors;
    sum.elements += n;
    sum.bytes += size;
    bytes += size;
    if (is_parameter(tensor)) parameters += n * tensor.weights_each;
    list.push_back({{"name", tensor.name}, {"type", tensor.dtype}, {"shape", tensor.shape}, {"bytes", size}});
  }
  report["parameters"] = parameters;
  report["bytes"] = bytes;
  report["bits_per_parameter"] = parameters > 0 ? static_cast<double>(bytes) * 8.0 / static_cast<double>(parameters) : 0.0;
  report["types"] = Json::array();
  for (const auto& [type, sum] : by_type)
    report["types"].push_back({{"type", type}, {"tensors", sum.tensors}, {"elements", sum.elements}, {"bytes", sum.bytes}});
  report["tensors"] = std::move(list);
}

const char* name_of_scaling(RopeConfig::Scaling scaling) {
  switch (scaling) {
    case RopeConfig::Scaling::none: return "none";
    case RopeConfig::Scaling::linear: return "linear";
    case RopeConfig::Scaling::yarn: return "yarn";
    case RopeConfig::Scaling::llama3: return "llama3";
  }
  return "?";
}

Json config_json(const Config& c) {
  Json out{{"family", name_of(c.family)}, {"vocab", c.vocab},   {"hidden", c.hidden},
           {"layers", c.n_layers},        {"heads", c.n_heads}, {"context", c.max_positions}};
  if (c.mla) {
    out["attention"] = {{"kind", "mla"},  {"q_rank", c.q_rank},     {"kv_rank", c.kv_rank},
                        {"nope", c.nope}, {"rope_dim", c.rope.dim}, {"v_dim", c.v_dim}};
  } else {
    out["attention"] = {{"kind", "gqa"},          {"kv_heads", c.n_kv_heads}, {"head_dim", c.head_dim},
                        {"qkv_bias", c.qkv_bias}, {"qk_norm", c.qk_norm},     {"rope_dim", c.rope.dim}};
  }
  out["rope"] = {{"theta", c.rope.theta}, {"scaling", name_of_scaling(c.rope.scaling)}, {"factor", c.rope.factor}};
  out["intermediate"] = c.intermediate;
  if (c.n_experts > 0) {
    out["experts"] = {{"routed", c.n_experts},
                      {"per_token", c.router.top_k},
                      {"shared", c.n_shared},
                      {"intermediate", c.moe_intermediate},
                      {"first_dense_layers", c.first_dense},
                      {"scoring", c.router.scoring == Scoring::sigmoid ? "sigmoid" : "softmax"},
                      {"groups", c.router.n_group},
                      {"groups_per_token", c.router.topk_group},
                      {"scale", c.router.scale}};
  }
  out["tied_head"] = c.tied_head;
  out["mtp_layers"] = c.n_mtp_layers;
  out["bos_id"] = c.bos_id;
  out["eos_ids"] = c.eos_ids;
  return out;
}

Json kv_json(const Config& config) {
  Json out;
  for (const auto& [name, format] : {std::pair{"f32", KvFormat::f32}, std::pair{"bf16", KvFormat::bf16}})
    out[name] = config.kv_layout(format, 16).token_bytes() * static_cast<size_t>(config.n_layers);
  if (config.mla && fp8_row_fits(config.kv_rank, config.rope.dim))
    out["fp8"] = config.kv_layout(KvFormat::fp8, 16).token_bytes() * static_cast<size_t>(config.n_layers);
  return out;
}

Json tokenizer_json(const Tokenizer& t) {
  const auto optional_id = [&](std::optional<int> id) { return id ? Json{{"id", *id}, {"text", std::string(t.token_text(*id))}} : Json(); };
  Json out{{"tokens", t.size()}, {"bos", optional_id(t.bos())}, {"adds_bos", t.add_bos()}, {"end", Json::array()}};
  for (const int id : t.eos_ids()) out["end"].push_back(optional_id(id));
  out["chat_template"] = !t.chat_template().empty();
  return out;
}

std::string shape_text(const Json& shape) {
  std::string text;
  for (const auto& dim : shape) text += (text.empty() ? "" : " x ") + std::to_string(dim.get<int64_t>());
  return text.empty() ? "scalar" : text;
}

std::string config_text(const Json& c) {
  std::string out;
  const auto line = [&](const char* label, const std::string& text) { out += fmt::format("{:<14}{}\n", label, text); };
  line("layers", fmt::format("{}, hidden {}, vocabulary {}, context {}", c["layers"].get<int>(), c["hidden"].get<int>(),
                             c["vocab"].get<int>(), c["context"].get<int>()));
  const Json& a = c["attention"];
  if (a["kind"] == "mla")
    line("attention", fmt::format("MLA, {} heads of {} + {}, value {}, latent {}, {}", c["heads"].get<int>(), a["nope"].get<int>(),
                                  a["rope_dim"].get<int>(), a["v_dim"].get<int>(), a["kv_rank"].get<int>(),
                                  a["q_rank"] == 0 ? std::string("full query") : fmt::format("query rank {}", a["q_rank"].get<int>())));
  else
    line("attention", fmt::format("{} heads of {}, {} for keys and values{}{}", c["heads"].get<int>(), a["head_dim"].get<int>(),
                                  a["kv_heads"].get<int>(), a["qkv_bias"] == true ? ", with bias" : "",
                                  a["qk_norm"] == true ? ", normalised q and k" : ""));
  const Json& r = c["rope"];
  line("rope", fmt::format("theta {:.0f}, scaling {}{}", r["theta"].get<double>(), r["scaling"].get<std::string>(),
                           r["scaling"] == "none" ? "" : fmt::format(" x {:g}", r["factor"].get<double>())));
  if (c.contains("experts")) {
    const Json& e = c["experts"];
    line("experts", fmt::format("{} of {} per token, {} shared, width {}, {} scores, {} of {} groups; first {} layers dense",
                                e["per_token"].get<int>(), e["routed"].get<int>(), e["shared"].get<int>(), e["intermediate"].get<int>(),
                                e["scoring"].get<std::string>(), e["groups_per_token"].get<int>(), e["groups"].get<int>(),
                                e["first_dense_layers"].get<int>()));
  }
  line("feed-forward", fmt::format("width {}", c["intermediate"].get<int>()));
  line("head", c["tied_head"] == true ? "tied to the embedding" : "its own");
  if (c["mtp_layers"] != 0)
    line("prediction", fmt::format("multi-token layers: {}, used by --speculation mtp", c["mtp_layers"].get<int>()));
  return out;
}

std::string token_text(const Json& token) {
  return token.is_null() ? "none" : fmt::format("{} {}", token["id"].get<int>(), printable(token["text"].get<std::string>()));
}

}  // namespace

Json model_report(const Checkpoint& checkpoint) {
  Json report{{"path", checkpoint.name()}, {"container", checkpoint.container() == Checkpoint::Container::gguf ? "gguf" : "safetensors"}};
  Json notes = Json::array(), problems = Json::array();
  report["architecture"] = nullptr;
  report["config"] = nullptr;
  report["kv_bytes_per_token"] = nullptr;
  try {
    const Config config = read_config(checkpoint);
    report["architecture"] = config.architecture;
    report["config"] = config_json(config);
    report["kv_bytes_per_token"] = kv_json(config);
    for (const std::string& note : config.notes) notes.push_back(note);
  } catch (const Error& error) {
    problems.push_back(error.what());
  }
  report["tokenizer"] = nullptr;
  try {
    report["tokenizer"] = tokenizer_json(tokenizer_of(checkpoint));
    if (!checkpoint.chat_template_file().empty()) report["tokenizer"]["chat_template"] = true;
  } catch (const Error& error) {
    problems.push_back(error.what());
  }
  report_tensors(checkpoint, report);
  for (const std::string& name : checkpoint.unmapped()) notes.push_back("not used: " + name);
  report["notes"] = std::move(notes);
  report["problems"] = std::move(problems);
  return report;
}

std::string report_text(const Json& report, bool with_tensors) {
  std::string out;
  const auto line = [&](const char* label, const std::string& text) { out += fmt::format("{:<14}{}\n", label, text); };
  line("model", report["path"].get<std::string>() + " (" + report["container"].get<std::string>() + ")");
  if (!report["architecture"].is_null()) line("architecture", report["architecture"].get<std::string>());
  line("parameters",
       fmt::format("{} in {} tensors, {}, {:.2f} bits each", count_text(report["parameters"].get<double>()), report["tensors"].size(),
                   bytes_text(report["bytes"].get<double>()), report["bits_per_parameter"].get<double>()));
  if (!report["config"].is_null()) out += config_text(report["config"]);
  if (const Json& kv = report["kv_bytes_per_token"]; !kv.is_null())
    line("KV cache",
         fmt::format("{} per token in bf16, {} in f32{}", bytes_text(kv["bf16"].get<double>()), bytes_text(kv["f32"].get<double>()),
                     kv.contains("fp8") ? fmt::format(", {} in fp8", bytes_text(kv["fp8"].get<double>())) : ""));
  if (const Json& t = report["tokenizer"]; !t.is_null()) {
    std::string ends;
    for (const auto& end : t["end"]) ends += (ends.empty() ? "" : ", ") + token_text(end);
    line("tokenizer",
         fmt::format("{} tokens; BOS {}{}; end {}; {} chat template", t["tokens"].get<int>(), token_text(t["bos"]),
                     t["adds_bos"] == true ? " (added)" : "", ends.empty() ? "none" : ends, t["chat_template"] == true ? "with" : "no"));
  }
  out += fmt::format("\n{:<12}{:>9}{:>14}{:>12}\n", "type", "tensors", "numbers", "size");
  for (const auto& type : report["types"])
    out += fmt::format("{:<12}{:>9}{:>14}{:>12}\n", type["type"].get<std::string>(), type["tensors"].get<int64_t>(),
                       count_text(type["elements"].get<double>()), bytes_text(type["bytes"].get<double>()));
  if (with_tensors) {
    size_t width = 4;
    for (const auto& tensor : report["tensors"]) width = std::max(width, printable(tensor["name"].get<std::string>(), 100).size());
    out += fmt::format("\n{:<{}}  {:<10}{:>12}  {}\n", "tensor", width, "type", "size", "shape");
    for (const auto& tensor : report["tensors"])
      out += fmt::format("{:<{}}  {:<10}{:>12}  {}\n", printable(tensor["name"].get<std::string>(), 100), width,
                         tensor["type"].get<std::string>(), bytes_text(tensor["bytes"].get<double>()), shape_text(tensor["shape"]));
  }
  for (const auto& [key, label] : {std::pair{"notes", "note"}, std::pair{"problems", "problem"}}) {
    if (!report[key].empty()) out += "\n";
    for (const auto& text : report[key]) out += fmt::format("{}: {}\n", label, printable(text.get<std::string>(), 400));
  }
  return out;
}

}  // namespace cachalot
