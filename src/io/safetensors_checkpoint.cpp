// A Checkpoint in safetensors: one file or shards, Hugging Face names mapped to the canonical ones, quantized weights joined with scales
// and zero points that may lie in another shard, experts stacked by their ids.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "io/checkpoint_impl.h"
#include "io/duplicates.h"
#include "io/name_map.h"
#include "io/quantized_tensors.h"
#include "io/safetensors.h"
#include "io/shard_index.h"

namespace cachalot {
namespace fs = std::filesystem;
namespace {

constexpr size_t kMiB = 1u << 20;

// Companion files of a model directory: "" when absent.
std::string read_companion(const fs::path& path, size_t limit) {
  std::error_code ignored;
  return fs::exists(path, ignored) ? read_text_file(path, limit) : std::string();
}

class SafetensorsCheckpoint final : public Checkpoint {
 public:
  explicit SafetensorsCheckpoint(const SafetensorsPlace& place) : directory_(place.directory), name_(place.name) {
    config_json_ = read_companion(directory_ / "config.json", kMiB);
    const std::string gptq = read_companion(directory_ / "quantize_config.json", kMiB),
                      awq = read_companion(directory_ / "quant_config.json", kMiB);
    quant_ = read_quant_config({directory_.string(), config_json_, gptq, awq});
    if (place.indexed) {
      add_shards(ShardIndex::open(place.file));
    } else {
      files_.push_back(SafetensorsFile::open(place.file));
      collect_tensors();
    }
    map_names();
  }

  [[nodiscard]] Container container() const override { return Container::safetensors; }
  [[nodiscard]] std::string name() const override { return name_; }
  [[nodiscard]] const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  [[nodiscard]] bool has(std::string_view canonical) const override;
  [[nodiscard]] LinearSource linear(std::string_view canonical, int n_matrices, int out, int in) const override;
  [[nodiscard]] std::vector<float> vector(std::string_view canonical, int n) const override;
  [[nodiscard]] std::vector<std::string> unmapped() const override { return unmapped_; }
  void forget(const LinearSource& source) const override {
    for (const auto& file : files_) forget_in(*file->mapping(), source);
  }

  [[nodiscard]] std::string config_json() const override { return config_json_; }
  [[nodiscard]] std::string generation_config_json() const override { return read_companion(directory_ / "generation_config.json", kMiB); }
  [[nodiscard]] std::string tokenizer_json() const override { return read_companion(directory_ / "tokenizer.json", 64 * kMiB); }
  [[nodiscard]] std::string tokenizer_config_json() const override {
    return read_companion(directory_ / "tokenizer_config.json", 8 * kMiB);
  }
  [[nodiscard]] std::string chat_template_file() const override { return read_companion(directory_ / "chat_template.jinja", kMiB); }

 private:
  // The tensors that a canonical name stands for: one with expert -1, or experts in the order of their ids.
  struct Part {
    int expert = -1;
    uint32_t tensor = 0;  // place in tensors_
    bool codes = false;   // integer codes, with scales and zero points in other tensors
  };
  using Parts = std::vector<Part>;

  void add_shards(const ShardIndex& index);
  void collect_tensors();
  void map_names();
  const Parts& parts_of(std::string_view canonical) const;
  const TensorInfo* find(std::string_view name) const {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : &tensors_[found->second];
  }
  [[nodiscard]] FindTensor finder() const {
    return [this](std::string_view name) { return find(name); };
  }
  void check_experts(const Parts& parts, std::string_view canonical, int n_matrices) const;
  LinearSource planar(const Parts& parts, int n_matrices, int out, int in) const;
  void add_matrix(LinearSource& source, uint32_t tensor) const;
  void keep_alive(LinearSource& source, uint32_t tensor) const;

  fs::path directory_;
  std::string name_, config_json_;
  QuantConfig quant_;
  std::vector<std::shared_ptr<const SafetensorsFile>> files_;
  std::vector<TensorInfo> tensors_;
  std::vector<uint32_t> first_of_file_;  // place in tensors_ of each file's first tensor
  std::unordered_map<std::string_view, uint32_t> by_name_;
  StringMap<Parts> parts_;
  std::vector<std::string> unmapped_;
};

void SafetensorsCheckpoint::add_shards(const ShardIndex& index) {
  for (const std::string& file : index.files) {
    const fs::path path = directory_ / file;
    if (std::error_code ignored; !fs::exists(path, ignored)) fail("{}: the file {} is missing", index.name, path.string());
    files_.push_back(SafetensorsFile::open(path));
  }
  collect_tensors();
  std::vector<std::string> missing;
  size_t n_missing = 0;
  for (const auto& [tensor, file] : index.weight_map) {
    const auto found = by_name_.find(tensor);
    if (found != by_name_.end() && tensors_[found->second].file == files_[file]->name()) continue;
    if (++n_missing <= 4) missing.push_back(fmt::format("\"{}\" in {}", printable(tensor), index.files[file]));
  }
  if (n_missing != 0)
    fail("{}: {} tensors are not where the index says: {}{}", index.name, n_missing, fmt::join(missing, ", "),
         n_missing > 4 ? ", ..." : "");
}

void SafetensorsCheckpoint::collect_tensors() {
  for (const auto& file : files_) {
    first_of_file_.push_back(static_cast<uint32_t>(tensors_.size()));
    tensors_.insert(tensors_.end(), file->tensors().begin(), file->tensors().end());
  }
  by_name_.reserve(tensors_.size());
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    const auto [place, added] = by_name_.emplace(tensors_[i].name, i);
    if (!added)
      fail("{}: tensor \"{}\" is in {} and in {}", name_, printable(tensors_[i].name), tensors_[place->second].file, tensors_[i].file);
  }
}

void SafetensorsCheckpoint::map_names() {
  std::vector<bool> covered(tensors_.size());
  const FindTensor finder = this->finder();
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    TensorInfo& tensor = tensors_[i];
    if (fp8_scales_of(tensor, finder) != nullptr) {
      tensor.format = Format::fp8_block;
      tensor.has_format = true;
    }
    const std::string weight = weight_of_codes(quant_, tensor);
    const auto mapped = map_hf_name(weight.empty() ? tensor.name : weight);
    if (!mapped) continue;
    covered[i] = true;
    parts_[mapped->canonical].push_back({mapped->expert, i, !weight.empty()});
    if (weight.empty() && tensor.format != Format::fp8_block) continue;
    if (!weight.empty()) tensor.weights_each = quant_.bits == 8 ? 4 : 8;
    for (const std::string& name : companions_of(quant_, tensor)) {
      const auto companion = by_name_.find(name);
      if (companion == by_name_.end()) continue;
      covered[companion->second] = true;
      tensors_[companion->second].weights_each = 0;
    }
  }
  for (auto& [canonical, parts] : parts_) {
    std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.expert < b.expert; });
    const auto same = [](const Part& a, const Part& b) { return a.expert == b.expert; };
    const auto twice = std::adjacent_find(parts.begin(), parts.end(), same);
    if (twice != parts.end())
      fail("{}: tensors \"{}\" and \"{}\" are both {}", name_, printable(tensors_[twice->tensor].name),
           printable(tensors_[(twice + 1)->tensor].name), canonical);
  }
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (!covered[i]) unmapped_.push_back(tensors_[i].name);
  }
}

bool SafetensorsCheckpoint::has(std::string_view canonical) const {
  const auto found = parts_.find(canonical);
  if (found == parts_.end()) return false;
  const Parts& parts = found->second;
  // Ids are sorted and unique, so the stack is full when the last one is its size less one.
  return parts.back().expert < 0 || parts.back().expert == static_cast<int>(parts.size()) - 1;
}

const SafetensorsCheckpoint::Parts& SafetensorsCheckpoint::parts_of(std::string_view canonical) const {
  const auto found = parts_.find(canonical);
  if (found != parts_.end()) return found->second;
  const std::string expected = hf_name_of(canonical);
  // The usual reason: the configuration got lost, and with it what the codes mean.
  for (const char* ending : {".qweight", ".weight_packed"}) {
    if (!expected.ends_with(".weight")) break;
    const std::string codes = expected.substr(0, expected.size() - std::string_view(".weight").size()) + ending;
    if (const TensorInfo* const tensor = find(codes))
      fail("{}: tensor \"{}\": found quantized codes, expected \"{}\": {}", tensor->file, printable(codes), expected,
           quant_.where.empty() ? "config.json has no quantization_config that says how to read them"
                                : quant_.where + " says something else");
  }
  fail("{}: the tensor \"{}\" is missing", name_, expected.empty() ? std::string(canonical) : expected);
}

void SafetensorsCheckpoint::add_matrix(LinearSource& source, uint32_t place) const {
  const TensorInfo& tensor = tensors_[place];
  check_shape(tensor, {source.out, source.in});
  if (tensor.dtype == "F8_E4M3" && !tensor.has_format)
    fail("{}: tensor \"{}\": type F8_E4M3 needs its scales, but the tensor \"{}_scale_inv\" is missing", tensor.file,
         printable(tensor.name), printable(tensor.name));
  check_readable(tensor);
  keep_alive(source, place);
  source.matrices.push_back({.data = tensor.data, .scales = {}, .zeros = {}});
  if (tensor.format != Format::fp8_block) return;
  const TensorInfo& scales = *fp8_scales_of(tensor, finder());
  const Fp8Scales read = read_fp8_scales(scales, source.out, source.in);
  source.matrices.back().scales = read.bytes;
  if (read.owned)
    source.keep_alive.push_back(read.owned);
  else
    keep_alive(source, static_cast<uint32_t>(&scales - tensors_.data()));
}

void SafetensorsCheckpoint::keep_alive(LinearSource& source, uint32_t tensor) const {
  const auto after = std::upper_bound(first_of_file_.begin(), first_of_file_.end(), tensor);
  const auto& mapping = files_[static_cast<size_t>(after - first_of_file_.begin()) - 1]->mapping();
  if (std::find(source.keep_alive.begin(), source.keep_alive.end(), mapping) == source.keep_alive.end())
    source.keep_alive.push_back(mapping);
}

void SafetensorsCheckpoint::check_experts(const Parts& parts, std::string_view canonical, int n_matrices) const {
  if (parts[0].expert < 0 && n_matrices != 1)
    fail("{}: tensor \"{}\": found one matrix, expected {}", name_, printable(tensors_[parts[0].tensor].name), n_matrices);
  if (parts[0].expert < 0) return;
  for (int i = 0; i < n_matrices; ++i)
    if (static_cast<size_t>(i) >= parts.size() || parts[static_cast<size_t>(i)].expert != i)
      fail("{}: the tensor \"{}\" is missing ({} experts expected)", name_, hf_name_of(canonical, i), n_matrices);
  if (parts.size() != static_cast<size_t>(n_matrices))
    fail("{}: found the tensor \"{}\", but {} experts are expected", name_,
         printable(tensors_[parts[static_cast<size_t>(n_matrices)].tensor].name), n_matrices);
}

LinearSource SafetensorsCheckpoint::planar(const Parts& parts, int n_matrices, int out, int in) const {
  const FindTensor finder = this->finder();
  std::vector<PlanarWeights> layers;
  for (int i = 0; i < n_matrices; ++i)
    layers.push_back(read_planar(quant_, tensors_[parts[static_cast<size_t>(i)].tensor], out, in, finder));
  return planar_source(tensors_[parts[0].tensor].name, std::move(layers));
}

LinearSource SafetensorsCheckpoint::linear(std::string_view canonical, int n_matrices, int out, int in) const {
  const Parts& parts = parts_of(canonical);
  check_experts(parts, canonical, n_matrices);
  const TensorInfo& first = tensors_[parts[0].tensor];
  for (const Part& part : parts) {
    const TensorInfo& tensor = tensors_[part.tensor];
    if (part.codes != parts[0].codes || tensor.format != first.format)
      fail("{}: tensor \"{}\": type: found {}, expected {} as \"{}\" has", tensor.file, printable(tensor.name), tensor.dtype, first.dtype,
           printable(first.name));
  }
  if (parts[0].codes) return planar(parts, n_matrices, out, in);
  LinearSource source{.name = first.name, .format = first.format, .out = out, .in = in};
  for (const Part& part : parts) add_matrix(source, part.tensor);
  return source;
}

std::vector<float> SafetensorsCheckpoint::vector(std::string_view canonical, int n) const {
  return read_vector(tensors_[parts_of(canonical)[0].tensor], n);
}

}  // namespace

std::unique_ptr<Checkpoint> open_safetensors_checkpoint(const SafetensorsPlace& place) {
  return std::make_unique<SafetensorsCheckpoint>(place);
}

}  // namespace cachalot
