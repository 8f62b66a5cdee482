// A Checkpoint in safetensors: one file or shards, Hugging Face names mapped to the canonical ones, FP8 weights joined with the
// scales that may lie in another shard, experts stacked by their ids.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/json.h"
#include "io/checkpoint_impl.h"
#include "io/duplicates.h"
#include "io/name_map.h"
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

// Only plain weights and DeepSeek's FP8 are read; other schemes store tensors under names and types of their own.
void check_quantization(std::string_view config_json, const std::string& file) {
  if (config_json.empty()) return;
  const auto document = JsonDocument::parse(config_json, file, {.max_bytes = kMiB, .max_depth = 32});
  const auto quantization = document.root().find("quantization_config");
  if (!quantization) return;
  const JsonValue method = quantization->at("quant_method");
  if (method.string() != "fp8")
    fail("{}: found \"{}\", expected \"fp8\" or an unquantized model", method.where(), printable(method.string()));
  if (const std::string fmt = quantization->string_or("fmt", "e4m3"); fmt != "e4m3")
    fail("{}: fmt: found \"{}\", expected \"e4m3\"", quantization->where(), printable(fmt));
  const JsonValue block = quantization->at("weight_block_size");
  std::vector<int64_t> sides;
  for (const auto side : block.array()) sides.push_back(JsonValue(side, block.where()).integer());
  if (sides != std::vector<int64_t>{kFp8Block, kFp8Block})
    fail("{}: found [{}], expected [{}, {}]", block.where(), fmt::join(sides, ", "), kFp8Block, kFp8Block);
}

class SafetensorsCheckpoint final : public Checkpoint {
 public:
  explicit SafetensorsCheckpoint(const SafetensorsPlace& place) : directory_(place.directory), name_(place.name) {
    config_json_ = read_companion(directory_ / "config.json", kMiB);
    check_quantization(config_json_, (directory_ / "config.json").string());
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
  };
  using Parts = std::vector<Part>;

  void add_shards(const ShardIndex& index);
  void collect_tensors();
  void map_names();
  const Parts& parts_of(std::string_view canonical) const;
  WeightBytes matrix_of(const TensorInfo& tensor, int out, int in) const;
  void keep_alive(LinearSource& source, uint32_t tensor) const;

  fs::path directory_;
  std::string name_, config_json_;
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
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    TensorInfo& tensor = tensors_[i];
    const auto scale = tensor.dtype == "F8_E4M3" ? by_name_.find(tensor.name + "_scale_inv") : by_name_.end();
    if (scale != by_name_.end()) {
      tensor.format = Format::fp8_block;
      tensor.has_format = true;
    }
    const auto mapped = map_hf_name(tensor.name);
    if (!mapped) continue;
    covered[i] = true;
    if (scale != by_name_.end()) covered[scale->second] = true;
    parts_[mapped->canonical].push_back({mapped->expert, i});
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
  fail("{}: the tensor \"{}\" is missing", name_, expected.empty() ? std::string(canonical) : expected);
}

WeightBytes SafetensorsCheckpoint::matrix_of(const TensorInfo& tensor, int out, int in) const {
  check_shape(tensor, {out, in});
  if (tensor.dtype == "F8_E4M3" && !tensor.has_format)
    fail("{}: tensor \"{}\": type F8_E4M3 needs its scales, but the tensor \"{}_scale_inv\" is missing", tensor.file,
         printable(tensor.name), printable(tensor.name));
  check_readable(tensor);
  if (tensor.format != Format::fp8_block) return {.data = tensor.data};
  const TensorInfo& scales = tensors_[by_name_.at(tensor.name + "_scale_inv")];
  if (scales.dtype != "F32") fail("{}: tensor \"{}\": type: found {}, expected F32", scales.file, printable(scales.name), scales.dtype);
  check_shape(scales, {(out + kFp8Block - 1) / kFp8Block, (in + kFp8Block - 1) / kFp8Block});
  return {.data = tensor.data, .scales = scales.data};
}

void SafetensorsCheckpoint::keep_alive(LinearSource& source, uint32_t tensor) const {
  const auto after = std::upper_bound(first_of_file_.begin(), first_of_file_.end(), tensor);
  const auto& mapping = files_[static_cast<size_t>(after - first_of_file_.begin()) - 1]->mapping();
  if (std::find(source.keep_alive.begin(), source.keep_alive.end(), mapping) == source.keep_alive.end())
    source.keep_alive.push_back(mapping);
}

LinearSource SafetensorsCheckpoint::linear(std::string_view canonical, int n_matrices, int out, int in) const {
  const Parts& parts = parts_of(canonical);
  const bool stacked = parts[0].expert >= 0;
  if (!stacked && n_matrices != 1)
    fail("{}: tensor \"{}\": found one matrix, expected {}", name_, printable(tensors_[parts[0].tensor].name), n_matrices);
  const TensorInfo& first = tensors_[parts[0].tensor];
  LinearSource source{.name = first.name, .format = first.format, .out = out, .in = in};
  for (int i = 0; i < n_matrices; ++i) {
    const auto place = static_cast<size_t>(i);
    if (stacked && (place >= parts.size() || parts[place].expert != i))
      fail("{}: the tensor \"{}\" is missing ({} experts expected)", name_, hf_name_of(canonical, i), n_matrices);
    const TensorInfo& tensor = tensors_[parts[place].tensor];
    source.matrices.push_back(matrix_of(tensor, out, in));
    if (tensor.format != first.format)
      fail("{}: tensor \"{}\": type: found {}, expected {} as \"{}\" has", tensor.file, printable(tensor.name), tensor.dtype, first.dtype,
           printable(first.name));
    keep_alive(source, parts[place].tensor);
    if (tensor.format == Format::fp8_block) keep_alive(source, by_name_.at(tensor.name + "_scale_inv"));
  }
  if (parts.size() != static_cast<size_t>(n_matrices))
    fail("{}: found the tensor \"{}\", but {} experts are expected", name_,
         printable(tensors_[parts[static_cast<size_t>(n_matrices)].tensor].name), n_matrices);
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
