// write_safetensors: header first, then the bytes of every tensor.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "io/atomic_file.h"
#include "io/duplicates.h"
#include "io/safetensors.h"

namespace cachalot {

void write_safetensors(const std::filesystem::path& path, std::vector<SafetensorsOutput> tensors) {
  const auto bits_of = [](const SafetensorsOutput& tensor) {
    const SafetensorsDtype* dtype = find_safetensors_dtype(tensor.dtype);
    CACHALOT_CHECK(dtype != nullptr, "tensor {} of unknown dtype {}", tensor.name, tensor.dtype);
    return dtype->bits;
  };
  std::sort(tensors.begin(), tensors.end(), [&](const auto& a, const auto& b) {
    const int bits_a = bits_of(a), bits_b = bits_of(b);
    return bits_a != bits_b ? bits_a > bits_b : (a.dtype != b.dtype ? a.dtype < b.dtype : a.name < b.name);
  });
  const auto twice = first_duplicate(tensors.size(), [&](size_t i) { return std::string_view(tensors[i].name); });
  CACHALOT_CHECK(!twice, "tensor {} twice", *twice);
  std::string text = R"({"__metadata__":{"format":"pt"})";
  uint64_t at = 0;
  for (const SafetensorsOutput& tensor : tensors) {
    auto bits = static_cast<uint64_t>(bits_of(tensor));
    for (const int64_t dim : tensor.shape) bits *= static_cast<uint64_t>(dim);
    CACHALOT_CHECK(bits == 8 * tensor.data.size(), "tensor {}: {} bytes for {} bits", tensor.name, tensor.data.size(), bits);
    text += fmt::format(R"(,{}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", nlohmann::json(tensor.name).dump(), tensor.dtype,
                        fmt::join(tensor.shape, ","), at, at + tensor.data.size());
    at += tensor.data.size();
  }
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');
  uint64_t size = text.size();

  AtomicFile file(path);
  file.write(std::as_bytes(std::span(&size, 1)));
  file.write(text);
  for (const SafetensorsOutput& tensor : tensors) file.write(tensor.data);
  file.commit();
}

}  // namespace cachalot
