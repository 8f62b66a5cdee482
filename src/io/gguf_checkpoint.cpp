// A Checkpoint in GGUF: its names are the canonical ones, and stacks of matrices are tensors of three dimensions.
#include <utility>

#include "base/error.h"
#include "io/checkpoint_impl.h"
#include "io/gguf.h"
#include "io/name_map.h"

namespace cachalot {
namespace {

class GgufCheckpoint final : public Checkpoint {
 public:
  GgufCheckpoint(std::shared_ptr<const GgufFile> file, std::string name) : file_(std::move(file)), name_(std::move(name)) {
    const auto& tensors = file_->tensors();
    by_name_.reserve(tensors.size());
    for (const TensorInfo& tensor : tensors) by_name_.emplace(tensor.name, &tensor);
  }

  [[nodiscard]] Container container() const override { return Container::gguf; }
  [[nodiscard]] std::string name() const override { return name_; }
  [[nodiscard]] const std::vector<TensorInfo>& tensors() const override { return file_->tensors(); }
  [[nodiscard]] const GgufFile* gguf() const override { return file_.get(); }
  [[nodiscard]] bool has(std::string_view canonical) const override { return by_name_.contains(canonical); }

  [[nodiscard]] LinearSource linear(std::string_view canonical, int n_matrices, int out, int in) const override {
    const TensorInfo& tensor = get(canonical);
    // GGML drops and adds outer dimensions of one at will.
    std::vector<int64_t> shape = tensor.shape, expected = {n_matrices, out, in};
    for (auto* dims : {&shape, &expected}) {
      while (dims->size() > 2 && dims->front() == 1) dims->erase(dims->begin());
    }
    if (shape != expected) check_shape(tensor, expected);
    LinearSource source{.name = tensor.name, .format = tensor.format, .out = out, .in = in};
    const size_t bytes = tensor.data.size() / static_cast<size_t>(n_matrices);
    for (int i = 0; i < n_matrices; ++i) source.matrices.push_back({.data = tensor.data.subspan(static_cast<size_t>(i) * bytes, bytes)});
    source.keep_alive.push_back(file_);
    return source;
  }

  [[nodiscard]] std::vector<float> vector(std::string_view canonical, int n) const override { return read_vector(get(canonical), n); }

  void forget(const LinearSource& source) const override {
    for (const auto& part : file_->parts()) forget_in(*part, source);
  }

  [[nodiscard]] std::vector<std::string> unmapped() const override {
    std::vector<std::string> out;
    for (const TensorInfo& tensor : file_->tensors()) {
      if (!is_canonical_name(tensor.name)) out.push_back(tensor.name);
    }
    return out;
  }

 private:
  const TensorInfo& get(std::string_view canonical) const {
    const auto found = by_name_.find(canonical);
    if (found == by_name_.end()) fail("{}: the tensor \"{}\" is missing", name_, canonical);
    return *found->second;
  }

  std::shared_ptr<const GgufFile> file_;
  std::string name_;
  StringMap<const TensorInfo*> by_name_;
};

}  // namespace

std::unique_ptr<Checkpoint> open_gguf_checkpoint(const std::filesystem::path& path, std::string name) {
  return std::make_unique<GgufCheckpoint>(GgufFile::open(path), std::move(name));
}

}  // namespace cachalot
