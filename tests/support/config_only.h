// A checkpoint that is only its configuration files: for tests and fuzzing of what reads them.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "io/checkpoint.h"

namespace cachalot::test {

class ConfigOnly : public Checkpoint {
 public:
  explicit ConfigOnly(std::string config, std::string generation = {}) : config_(std::move(config)), generation_(std::move(generation)) {}
  [[nodiscard]] Container container() const override { return Container::safetensors; }
  [[nodiscard]] std::string name() const override { return "dir"; }
  [[nodiscard]] const std::vector<TensorInfo>& tensors() const override { return none_; }
  [[nodiscard]] bool has(std::string_view) const override { return false; }
  [[nodiscard]] LinearSource linear(std::string_view, int, int, int) const override { return {}; }
  [[nodiscard]] std::vector<float> vector(std::string_view, int) const override { return {}; }
  [[nodiscard]] std::vector<std::string> unmapped() const override { return {}; }
  [[nodiscard]] std::string config_json() const override { return config_; }
  [[nodiscard]] std::string generation_config_json() const override { return generation_; }

 private:
  std::string config_, generation_;
  std::vector<TensorInfo> none_;
};

}  // namespace cachalot::test
