// What formats hold, and their quantization_config.
#include "quant/file_format.h"

#include <algorithm>
#include <map>

#include "base/error.h"
#include "io/name_map.h"

namespace cachalot {
namespace {

using Json = nlohmann::ordered_json;

struct Name {
  FileFormat format;
  const char* name;
  const char* type;
};
constexpr Name kNames[] = {{FileFormat::gguf, "gguf", "q4_k_m"},
                           {FileFormat::awq, "awq", "int4-g128-zp"},
                           {FileFormat::gptq, "gptq", "int4-g128-sym"},
                           {FileFormat::gptq_v2, "gptq_v2", "int4-g128-zp"},
                           {FileFormat::compressed_tensors, "compressed-tensors", "int4-g128-sym"},
                           {FileFormat::fp8, "fp8", "fp8"}};

// Why a scheme has no place in the format whatever the shape, or "".
std::string refusal(FileFormat format, const Scheme& scheme) {
  if (is_float(scheme.format)) return {};
  if (format == FileFormat::fp8) return scheme.format == Format::fp8_block ? "" : "expected fp8";
  if (!is_planar(scheme.format)) return "expected int4 or int8";
  if (format == FileFormat::awq && scheme.format != Format::int4_planar) return "expected int4";
  if (format == FileFormat::gptq && !scheme.symmetric)
    return "expected a symmetric type (-sym): version 1 has no place for the zero point 0; gptq_v2 has";
  return {};
}

bool fits_words(const Scheme& scheme, const ModelMatrix& m) {
  if (!is_planar(scheme.format)) return true;
  const int per_word = 32 / planar_bits(scheme.format);
  return m.out % per_word == 0 && m.in % per_word == 0;
}

std::string module_of(const std::string& hf_name) {
  constexpr std::string_view kEnding = ".weight";
  return hf_name.substr(0, hf_name.size() - kEnding.size());
}

// The modules of a matrix or stack. A stack's are named one by one.
std::vector<std::string> modules_of(const ModelMatrix& m) {
  std::vector<std::string> out;
  if (m.name.find("_exps.") == std::string::npos) return {module_of(hf_name_of(m.name))};
  for (int e = 0; e < m.n_matrices; ++e) out.push_back(module_of(hf_name_of(m.name, e)));
  return out;
}

// A module's name as a regular expression; '*' stands for a number.
std::string escaped(std::string_view module) {
  std::string out;
  for (const char c : module) out += c == '.' ? "\\." : c == '*' ? "\\d+" : std::string(1, c);
  return out;
}
// One for the modules of a matrix or stack.
std::string pattern_of(const ModelMatrix& m) { return "^" + escaped(module_of(hf_name_of(m.name))) + "$"; }

// The schemes of the plan's quantized matrices by how many weights they have, most first.
std::vector<Scheme> schemes_of(const std::vector<PlannedMatrix>& plan) {
  std::vector<std::pair<Scheme, int64_t>> found;
  for (const PlannedMatrix& p : plan) {
    if (is_float(p.scheme.format)) continue;
    const auto at = std::find_if(found.begin(), found.end(), [&](const auto& entry) { return entry.first == p.scheme; });
    if (at == found.end())
      found.emplace_back(p.scheme, p.matrix.n_weights());
    else
      at->second += p.matrix.n_weights();
  }
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  std::vector<Scheme> out;
  for (const auto& entry : found) out.push_back(entry.first);
  return out;
}

int group_field(const Scheme& scheme) { return scheme.group > 0 ? scheme.group : -1; }

Json awq_config(const Scheme& scheme, const std::vector<std::string>& kept) {
  return {{"quant_method", "awq"},
          {"bits", 4},
          {"group_size", group_field(scheme)},
          {"zero_point", true},
          {"version", "gemm"},
          {"backend", "autoawq"},
          {"modules_to_not_convert", kept}};
}

Json gptq_config(FileFormat format, const std::vector<Scheme>& schemes, const std::vector<PlannedMatrix>& plan,
                 const std::vector<std::string>& kept) {
  const Scheme& main = schemes[0];
  Json out{{"quant_method", "gptq"},
           {"bits", planar_bits(main.format)},
           {"group_size", group_field(main)},
           {"desc_act", false},
           {"static_groups", false},
           {"sym", main.symmetric},
           {"lm_head", false},
           {"damp_percent", 0.01},
           {"true_sequential", true},
           {"checkpoint_format", format == FileFormat::gptq ? "gptq" : "gptq_v2"},
           {"pack_dtype", "int32"}};
  Json dynamic = Json::object();
  for (const std::string& module : kept) dynamic["-:^" + escaped(module) + "\\..*$"] = Json::object();
  for (const PlannedMatrix& p : plan) {
    if (p.matrix.name == "token_embd.weight") continue;
    if (p.matrix.name == "output.weight") {
      out["lm_head"] = !is_float(p.scheme.format);
      continue;
    }
    if (is_float(p.scheme.format))
      dynamic["-:" + pattern_of(p.matrix)] = Json::object();
    else if (!(p.scheme == main))
      dynamic["+:" + pattern_of(p.matrix)] = {
          {"bits", planar_bits(p.scheme.format)}, {"group_size", group_field(p.scheme)}, {"sym", p.scheme.symmetric}};
  }
  if (!dynamic.empty()) out["dynamic"] = std::move(dynamic);
  return out;
}

Json compressed_config(const Config& config, const std::vector<Scheme>& schemes, const std::vector<PlannedMatrix>& plan,
                       std::vector<std::string> kept) {
  Json groups = Json::object();
  for (size_t i = 0; i < schemes.size(); ++i) {
    const Scheme& s = schemes[i];
    Json targets = Json::array();
    if (i == 0) {
      targets.push_back("Linear");
    } else {
      for (const PlannedMatrix& p : plan)
        if (p.scheme == s) targets.push_back("re:" + pattern_of(p.matrix));
    }
    Json weights{{"num_bits", planar_bits(s.format)},
                 {"type", "int"},
                 {"symmetric", s.symmetric},
                 {"strategy", s.group > 0 ? "group" : "channel"},
                 {"group_size", s.group > 0 ? Json(s.group) : Json(nullptr)},
                 {"block_structure", nullptr},
                 {"actorder", nullptr},
                 {"dynamic", false},
                 {"observer", "minmax"},
                 {"observer_kwargs", Json::object()}};
    groups["group_" + std::to_string(i)] = {
        {"targets", targets}, {"weights", weights}, {"input_activations", nullptr}, {"output_activations", nullptr}};
  }
  if (config.n_experts > 0) kept.emplace_back("re:.*\\.mlp\\.gate$");  // the router, where a reader makes it a linear layer
  return {{"quant_method", "compressed-tensors"},
          {"format", "pack-quantized"},
          {"quantization_status", "compressed"},
          {"global_compression_ratio", nullptr},
          {"kv_cache_scheme", nullptr},
          {"ignore", kept},
          {"config_groups", groups}};
}

}  // namespace

const char* name_of(FileFormat format) {
  for (const Name& entry : kNames)
    if (entry.format == format) return entry.name;
  return "?";
}

std::optional<FileFormat> file_format_of_name(std::string_view name) {
  for (const Name& entry : kNames)
    if (entry.name == name) return entry.format;
  return std::nullopt;
}

std::string default_type(FileFormat format) {
  for (const Name& entry : kNames)
    if (entry.format == format) return entry.type;
  return {};
}

std::vector<std::string> fit_recipe(FileFormat format, const Config& config, const Checkpoint& original, Recipe& recipe) {
  recipe.split_kv_b = false;
  std::vector<std::string> notes;
  const LinearSource embedding = original.linear("token_embd.weight", 1, config.vocab, config.hidden);
  const Scheme kept{embedding.format == Format::f16 ? Format::f16 : Format::bf16};
  std::optional<Scheme> awq;
  for (const PlannedMatrix& p : plan(recipe, config)) {
    if (const std::string why = refusal(format, p.wanted); !why.empty())
      fail("{}: {} has no place in {} files: {}", p.matrix.name, name_of(p.wanted), name_of(format), why);
    const bool head = p.matrix.name == "output.weight";
    if (!is_float(p.wanted.format) &&
        (p.matrix.name == "token_embd.weight" || (head && (format == FileFormat::awq || format == FileFormat::fp8))))
      fail("{}: {} has no place in {} files: expected bf16 or f16 for the {}", p.matrix.name, name_of(p.wanted), name_of(format),
           head ? "head" : "embedding");
    if (is_float(p.wanted.format)) {
      if (p.wanted.format == Format::bf16 && kept.format == Format::f16) recipe.exact[p.matrix.name] = kept;
      continue;
    }
    const bool fits = fits_words(p.scheme, p.matrix) && !is_float(p.scheme.format) && !(format == FileFormat::awq && p.fell_back());
    if (!fits) {
      notes.push_back(fmt::format("{}: [{}, {}] does not divide for {} in {} files: kept as {}", p.matrix.name, p.matrix.out, p.matrix.in,
                                  name_of(p.wanted), name_of(format), name_of(kept)));
      recipe.exact[p.matrix.name] = kept;
      continue;
    }
    if (format != FileFormat::awq) continue;
    if (awq && awq->group != p.scheme.group)
      fail("{}: {} beside {}: AWQ files have one group size", p.matrix.name, name_of(p.scheme), name_of(*awq));
    awq = p.scheme;
  }
  return notes;
}

nlohmann::ordered_json quantization_config(FileFormat format, const Config& config, const std::vector<PlannedMatrix>& plan,
                                           std::vector<std::string> kept) {
  const std::vector<Scheme> schemes = schemes_of(plan);
  if (schemes.empty()) fail("{} files: no matrix of the model is to be quantized", name_of(format));
  const std::vector<std::string> whole = kept;
  bool head_kept = config.tied_head;
  for (const PlannedMatrix& p : plan) {
    if (!is_float(p.scheme.format) || p.matrix.name == "token_embd.weight") continue;
    if (p.matrix.name == "output.weight") head_kept = true;
    if (p.matrix.name == "output.weight") continue;
    const std::vector<std::string> modules = modules_of(p.matrix);
    kept.insert(kept.end(), modules.begin(), modules.end());
  }
  if (head_kept) kept.insert(kept.begin(), "lm_head");
  switch (format) {
    case FileFormat::awq: return awq_config(schemes[0], kept);
    case FileFormat::gptq:
    case FileFormat::gptq_v2: return gptq_config(format, schemes, plan, whole);
    case FileFormat::compressed_tensors: return compressed_config(config, schemes, plan, std::move(kept));
    case FileFormat::fp8:
      return {{"quant_method", "fp8"},
              {"fmt", "e4m3"},
              {"activation_scheme", "dynamic"},
              {"weight_block_size", {kFp8Block, kFp8Block}},
              {"modules_to_not_convert", kept}};
    case FileFormat::gguf: break;
  }
  return {};
}

}  // namespace cachalot
