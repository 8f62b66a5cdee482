// Fuzz target: config.json and generation_config.json (split at the first NUL byte) into a Config.
#include <cstdint>
#include <string>

#include "base/error.h"
#include "model/config.h"

namespace {

class ConfigOnly : public cachalot::Checkpoint {
 public:
  ConfigOnly(std::string config, std::string generation) : config_(std::move(config)), generation_(std::move(generation)) {}
  [[nodiscard]] Container container() const override { return Container::safetensors; }
  [[nodiscard]] std::string name() const override { return "fuzz"; }
  [[nodiscard]] const std::vector<cachalot::TensorInfo>& tensors() const override { return none_; }
  [[nodiscard]] bool has(std::string_view) const override { return false; }
  [[nodiscard]] cachalot::LinearSource linear(std::string_view, int, int, int) const override { return {}; }
  [[nodiscard]] std::vector<float> vector(std::string_view, int) const override { return {}; }
  [[nodiscard]] std::vector<std::string> unmapped() const override { return {}; }
  [[nodiscard]] std::string config_json() const override { return config_; }
  [[nodiscard]] std::string generation_config_json() const override { return generation_; }

 private:
  std::string config_, generation_;
  std::vector<cachalot::TensorInfo> none_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const size_t split = text.find('\0');
  try {
    const cachalot::Config c =
        cachalot::read_config(ConfigOnly(text.substr(0, split), split == std::string::npos ? std::string{} : text.substr(split + 1)));
    if (c.rope.dim <= 256) (void)cachalot::rope_table(c.rope, 16);
  } catch (const cachalot::Error&) {
  }
  return 0;
}
