// Overlay: a checkpoint some of whose tensors are replaced by others held in memory, so that Decoder::load, an evaluation or a writer can
// take a half or wholly quantized model like any other.
#pragma once

#include <map>
#include <set>

#include "io/checkpoint.h"

namespace cachalot {

class Overlay final : public Checkpoint {
 public:
  // `base` must outlive the overlay.
  explicit Overlay(const Checkpoint& base) : base_(base) {}
  // An overlay on an overlay is made through Checkpoint&; a copy would share nothing with the first.
  Overlay(const Overlay&) = delete;
  Overlay& operator=(const Overlay&) = delete;

  // By GGUF name, in place of what `base` has.
  void put(const std::string& canonical, LinearSource source) { matrices_[canonical] = std::move(source); }
  void put(const std::string& canonical, std::vector<float> values) { vectors_[canonical] = std::move(values); }
  // As if `base` had no such tensor.
  void hide(const std::string& canonical) { hidden_.insert(canonical); }
  // Forgets the replacements whose names begin so ("blk.3."), and their memory.
  void drop(std::string_view prefix);

  [[nodiscard]] const std::map<std::string, LinearSource, std::less<>>& matrices() const { return matrices_; }
  [[nodiscard]] const std::map<std::string, std::vector<float>, std::less<>>& vectors() const { return vectors_; }

  [[nodiscard]] Container container() const override { return base_.container(); }
  [[nodiscard]] std::string name() const override { return base_.name(); }
  [[nodiscard]] const std::vector<TensorInfo>& tensors() const override { return base_.tensors(); }
  [[nodiscard]] bool has(std::string_view canonical) const override;
  [[nodiscard]] LinearSource linear(std::string_view canonical, int n_matrices, int out, int in) const override;
  [[nodiscard]] std::vector<float> vector(std::string_view canonical, int n) const override;
  [[nodiscard]] std::vector<std::string> unmapped() const override { return base_.unmapped(); }
  [[nodiscard]] const GgufFile* gguf() const override { return base_.gguf(); }
  [[nodiscard]] std::string config_json() const override { return base_.config_json(); }
  [[nodiscard]] std::string generation_config_json() const override { return base_.generation_config_json(); }
  [[nodiscard]] std::string tokenizer_json() const override { return base_.tokenizer_json(); }
  [[nodiscard]] std::string tokenizer_config_json() const override { return base_.tokenizer_config_json(); }
  [[nodiscard]] std::string chat_template_file() const override { return base_.chat_template_file(); }

 private:
  const Checkpoint& base_;
  std::map<std::string, LinearSource, std::less<>> matrices_;
  std::map<std::string, std::vector<float>, std::less<>> vectors_;
  std::set<std::string, std::less<>> hidden_;
};

}  // namespace cachalot
