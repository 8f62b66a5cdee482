// The four dialects: fp8, awq, gptq, compressed-tensors.
#include "io/quant_config.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "base/error.h"
#include "base/json.h"

namespace cachalot {
namespace {

constexpr size_t kMaxKept = 1'000'000;

[[noreturn]] void refuse(const JsonValue& json, std::string_view key, std::string_view found, std::string_view expected) {
  fail("{}: {}: found {}, expected {}", json.where(), key, found, expected);
}
std::string in_quotes(std::string_view text) { return fmt::format("\"{}\"", printable(text)); }

// The first of the keys that is there.
std::optional<std::string_view> first_key(const JsonValue& json, std::initializer_list<std::string_view> keys) {
  for (const std::string_view key : keys)
    if (json.find(key)) return key;
  return std::nullopt;
}

int read_bits(const JsonValue& json, std::initializer_list<std::string_view> keys, bool eight) {
  const std::string_view key = first_key(json, keys).value_or(*keys.begin());
  const int64_t bits = json.at(key).integer();
  if (bits != 4 && (bits != 8 || !eight)) refuse(json, key, fmt::to_string(bits), eight ? "4 or 8" : "4");
  return static_cast<int>(bits);
}

int read_group(const JsonValue& json, std::initializer_list<std::string_view> keys) {
  const std::string_view key = first_key(json, keys).value_or(*keys.begin());
  const int64_t group = json.at(key).integer();
  if (group != -1 && (group <= 0 || group > std::numeric_limits<int>::max()))
    refuse(json, key, fmt::to_string(group), "-1 or a positive number");
  return static_cast<int>(group);
}

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; });
  return text;
}

void read_kept(const JsonValue& json, std::initializer_list<std::string_view> keys, QuantConfig& out) {
  const auto key = first_key(json, keys);
  out.kept_key = key.value_or(*keys.begin());
  if (!key) return;
  const JsonValue list = json.at(*key);
  for (const auto item : list.array()) {
    const std::string_view name = JsonValue(item, list.where()).string();
    if (out.kept.size() == kMaxKept) fail("{}: more than {} names", list.where(), kMaxKept);
    if (!name.starts_with("re:")) out.kept.emplace_back(name);
  }
  std::sort(out.kept.begin(), out.kept.end());
}

void expect_blocks(const JsonValue& json, std::string_view key) {
  const auto block = json.find(key);
  if (!block) return;
  std::vector<int64_t> sides;
  for (const auto side : block->array()) sides.push_back(JsonValue(side, block->where()).integer());
  if (sides != std::vector<int64_t>{kFp8Block, kFp8Block})
    fail("{}: found [{}], expected [{}, {}]", block->where(), fmt::join(sides, ", "), kFp8Block, kFp8Block);
}

void read_fp8(const JsonValue& json, QuantConfig& out) {
  out.scheme = QuantConfig::Scheme::fp8;
  if (const std::string fmt = json.string_or("fmt", "e4m3"); fmt != "e4m3") refuse(json, "fmt", in_quotes(fmt), "\"e4m3\"");
  expect_blocks(json, "weight_block_size");
  read_kept(json, {"modules_to_not_convert", "ignored_layers"}, out);
}

void read_awq(const JsonValue& json, QuantConfig& out) {
  out.scheme = QuantConfig::Scheme::awq;
  for (const char* key : {"version", "format", "checkpoint_format"}) {
    if (const std::string version = json.string_or(key, "gemm"); lower(version) != "gemm")
      refuse(json, key, in_quotes(version), "\"gemm\"");
  }
  if (const std::string backend = json.string_or("backend", "autoawq"); lower(backend) == "llm-awq")
    refuse(json, "backend", in_quotes(backend), "\"autoawq\", whose words are in another order");
  out.bits = read_bits(json, {"bits", "w_bit"}, false);
  out.group = read_group(json, {"group_size", "q_group_size"});
  read_kept(json, {"modules_to_not_convert"}, out);
}

void read_gptq(const JsonValue& json, QuantConfig& out) {
  out.scheme = QuantConfig::Scheme::gptq;
  if (json.boolean_or("is_marlin_format", false)) refuse(json, "is_marlin_format", "true", "false");
  const std::string_view key = first_key(json, {"checkpoint_format", "format"}).value_or("checkpoint_format");
  const std::string format = lower(json.string_or(key, "gptq"));
  if (format != "gptq" && format != "gptq_v2") refuse(json, key, in_quotes(format), "\"gptq\" or \"gptq_v2\"");
  out.version = format == "gptq" ? GptqVersion::v1 : GptqVersion::v2;
  if (const std::string words = json.string_or("pack_dtype", "int32"); words != "int32")
    refuse(json, "pack_dtype", in_quotes(words), "\"int32\"");
  out.bits = read_bits(json, {"bits", "w_bit"}, true);
  out.group = read_group(json, {"group_size", "q_group_size"});
  // Modules that these patterns match differ; their shapes tell how.
  if (const auto dynamic = json.find("dynamic"); dynamic && dynamic->object().size() != 0) out.bits = out.group = 0;
  read_kept(json, {"modules_in_block_to_not_quantize", "modules_to_not_convert"}, out);
}

// Bits and group of one group's weights, or zeros for FP8 ones.
std::pair<int, int> read_weights(const JsonValue& weights) {
  const std::string type = weights.string_or("type", "int"), strategy = weights.string_or("strategy", "tensor");
  const int64_t bits = weights.at("num_bits").integer();
  if (type == "float") {
    if (bits != 8) refuse(weights, "num_bits", fmt::to_string(bits), "8 for type \"float\"");
    if (strategy != "block" && strategy != "tensor")
      refuse(weights, "strategy", in_quotes(strategy), "\"block\" or \"tensor\" for FP8 weights");
    if (strategy == "block") expect_blocks(weights, "block_structure");
    return {0, 0};
  }
  if (type != "int") refuse(weights, "type", in_quotes(type), "\"int\" or \"float\"");
  if (bits != 4 && bits != 8) refuse(weights, "num_bits", fmt::to_string(bits), "4 or 8");
  if (strategy == "group") return {static_cast<int>(bits), read_group(weights, {"group_size"})};
  if (strategy != "channel") refuse(weights, "strategy", in_quotes(strategy), "\"group\" or \"channel\"");
  return {static_cast<int>(bits), -1};
}

void read_compressed_tensors(const JsonValue& json, QuantConfig& out) {
  out.scheme = QuantConfig::Scheme::pack_quantized;
  const auto check_format = [](const JsonValue& holder, std::string_view extra) {
    const auto format = holder.find("format");
    if (!format) return;
    const std::string_view name = format->string();
    if (name != "pack-quantized" && name != "float-quantized" && name != extra)
      refuse(holder, "format", in_quotes(name), "\"pack-quantized\" or \"float-quantized\"");
  };
  check_format(json, "mixed-precision");
  if (const auto sparsity = json.find("sparsity_config"))
    if (const std::string format = sparsity->string_or("format", "dense"); format != "dense")
      refuse(*sparsity, "format", in_quotes(format), "\"dense\"");
  if (const auto transform = json.find("transform_config"); transform && transform->object().size() != 0)
    fail("{}: found transforms of weights and activations, expected none", transform->where());
  const JsonValue groups = json.at("config_groups");
  bool first = true;
  for (const auto [name, element] : groups.object()) {
    const JsonValue group(element, fmt::format("{}: {}", groups.where(), printable(name)));
    check_format(group, "pack-quantized");
    const auto [bits, size] = read_weights(group.at("weights"));
    if (bits != 0 && first) {
      out.bits = bits;
      out.group = size;
      first = false;
    } else if (bits != 0) {
      out.bits = out.bits == bits ? bits : 0;
      out.group = out.group == size ? size : 0;
    }
  }
  read_kept(json, {"ignore"}, out);
}

void read_dialect(const JsonValue& json, std::string_view default_method, QuantConfig& out) {
  out.where = json.where();
  const std::string method =
      default_method.empty() ? std::string(json.at("quant_method").string()) : json.string_or("quant_method", default_method);
  if (method == "fp8") return read_fp8(json, out);
  if (method == "awq") return read_awq(json, out);
  if (method == "gptq") return read_gptq(json, out);
  if (method == "compressed-tensors") return read_compressed_tensors(json, out);
  refuse(json, "quant_method", in_quotes(method), "\"awq\", \"gptq\", \"compressed-tensors\", \"fp8\" or an unquantized model");
}

}  // namespace

QuantConfig read_quant_config(const QuantConfigTexts& texts) {
  constexpr JsonLimits kLimits{.max_bytes = 8u << 20, .max_depth = 32};
  QuantConfig out;
  if (!texts.config.empty()) {
    const auto document = JsonDocument::parse(texts.config, texts.directory + "/config.json", kLimits);
    if (const auto quantization = document.root().find("quantization_config")) {
      read_dialect(*quantization, "", out);
      return out;
    }
  }
  for (const auto& [text, file, method] :
       {std::tuple{texts.quantize_config, "quantize_config.json", "gptq"}, std::tuple{texts.quant_config, "quant_config.json", "awq"}}) {
    if (text.empty()) continue;
    read_dialect(JsonDocument::parse(text, texts.directory + "/" + file, kLimits).root(), method, out);
    return out;
  }
  return out;
}

bool is_kept(const QuantConfig& config, std::string_view module) {
  const auto named = [&](std::string_view name) { return std::binary_search(config.kept.begin(), config.kept.end(), name); };
  // "model.layers.3.mlp.up_proj", then "model.layers.3.mlp", and so on.
  for (std::string_view part = module; !part.empty();) {
    if (named(part)) return true;
    const size_t dot = part.rfind('.');
    part = dot == std::string_view::npos ? std::string_view{} : part.substr(0, dot);
  }
  return false;
}

}  // namespace cachalot
