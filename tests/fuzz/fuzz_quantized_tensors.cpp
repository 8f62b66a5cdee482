// Fuzz target: tensors of a quantized layer whose types, shapes and bytes the input makes up, read as every scheme.
#include <algorithm>
#include <cstdint>
#include <map>
#include <string>

#include "base/error.h"
#include "io/quantized_tensors.h"
#include "io/safetensors.h"

namespace {

class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  uint8_t byte() { return at_ < size_ ? data_[at_++] : 0; }
  // The rest, as often as it takes.
  std::vector<std::byte> bytes(size_t n) {
    std::vector<std::byte> out(n);
    for (size_t i = 0; i < n; ++i) out[i] = size_ == 0 ? std::byte{0} : static_cast<std::byte>(data_[(at_ + i) % size_]);
    return out;
  }

 private:
  const uint8_t* data_;
  size_t size_, at_ = 0;
};

constexpr const char* kTypes[] = {"I32", "F16", "BF16", "F32", "I64", "F8_E4M3"};
constexpr const char* kEndings[] = {
    ".qweight",           ".qzeros",       ".scales",       ".g_idx",           ".weight_packed", ".weight_scale",
    ".weight_zero_point", ".weight_shape", ".weight_g_idx", ".weight_scale_inv"};
constexpr int kSizes[] = {0, 1, 2, 3, 4, 8, 16, 32, 64, 128};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using cachalot::QuantConfig;
  Input in(data, size);
  QuantConfig config{.scheme = static_cast<QuantConfig::Scheme>(in.byte() % 5), .where = "config", .kept_key = "ignore"};
  config.bits = in.byte() % 3 * 4;
  config.group = kSizes[in.byte() % 10];
  if (config.group == 3) config.group = -1;
  config.version = in.byte() % 2 == 0 ? cachalot::GptqVersion::v1 : cachalot::GptqVersion::v2;
  const int out = kSizes[in.byte() % 10], columns = kSizes[in.byte() % 10];

  std::map<std::string, cachalot::TensorInfo, std::less<>> tensors;
  std::vector<std::vector<std::byte>> buffers;
  for (const char* ending : kEndings) {
    if (in.byte() % 4 == 0) continue;
    const cachalot::SafetensorsDtype& type = *cachalot::find_safetensors_dtype(kTypes[in.byte() % 6]);
    cachalot::TensorInfo tensor{.name = std::string("m") + ending, .file = "file", .dtype = type.name};
    tensor.has_format = type.format.has_value();
    if (type.format) tensor.format = *type.format;
    size_t n = static_cast<size_t>(type.bits / 8);
    for (int d = in.byte() % 3; d >= 0; --d) {
      tensor.shape.push_back(kSizes[in.byte() % 10]);
      n *= static_cast<size_t>(tensor.shape.back());
    }
    buffers.push_back(in.bytes(n));
    tensor.data = buffers.back();
    tensors.emplace(tensor.name, tensor);
  }
  const cachalot::FindTensor find = [&](std::string_view name) -> const cachalot::TensorInfo* {
    const auto found = tensors.find(name);
    return found == tensors.end() ? nullptr : &found->second;
  };
  for (const auto& entry : tensors) {
    try {
      if (cachalot::weight_of_codes(config, entry.second).empty()) {
        (void)cachalot::read_fp8_scales(entry.second, std::max(out, 1), std::max(columns, 1));
        continue;
      }
      (void)cachalot::companions_of(config, entry.second);
      std::vector<cachalot::PlanarWeights> one{cachalot::read_planar(config, entry.second, out, columns, find)};
      (void)cachalot::planar_source("m", std::move(one));
    } catch (const cachalot::Error&) {
    }
  }
  return 0;
}
