// SafetensorsFile: the tensor table of one .safetensors file, checked before anything is believed.
// Format: the safetensors README (u64 header length, JSON header, data). Stricter than the reference reader: a key or tensor named
// twice, an unknown key, an escape in a tensor name, a zero-size tensor inside another one, and bytes after the last tensor are refused.
// Limits: header 100 MB, 10^6 tensors, names of 1 KiB, 16 dimensions, 16,384 metadata entries. A hostile header takes less than
// 100 MB of memory beside the mapped file.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/mapped_file.h"
#include "io/checkpoint.h"

namespace cachalot {

// A dtype string of the format; `format` is empty for types that no weight is read from. F8_E4M3 needs scales from elsewhere.
struct SafetensorsDtype {
  std::string_view name;
  int bits;
  std::optional<Format> format;
};
const SafetensorsDtype* find_safetensors_dtype(std::string_view name);

class SafetensorsFile {
 public:
  // Throws Error naming file, tensor, what was found and what was expected.
  static std::shared_ptr<const SafetensorsFile> open(const std::filesystem::path& path);
  // A whole file held in memory, which must outlive the result. `name` starts every error message.
  static std::shared_ptr<const SafetensorsFile> from_bytes(std::span<const std::byte> bytes, std::string name);

  [[nodiscard]] const std::string& name() const { return name_; }
  // In the order of their data.
  [[nodiscard]] const std::vector<TensorInfo>& tensors() const { return tensors_; }
  [[nodiscard]] const TensorInfo* find(std::string_view tensor) const;
  [[nodiscard]] const std::shared_ptr<const MappedFile>& mapping() const { return mapping_; }

 private:
  std::string name_;
  std::vector<TensorInfo> tensors_;
  std::shared_ptr<const MappedFile> mapping_;
};

// One tensor to be written. The bytes are little-endian, dense, and belong to the caller.
struct SafetensorsOutput {
  std::string name;
  std::string dtype;           // "F32", "BF16", "I32", ...
  std::vector<int64_t> shape;  // slowest first
  std::span<const std::byte> data;
};
// Writes a file in the reference writer's order (widest type first, then by name; header padded to 8 bytes), through a temporary
// file that is renamed at the end. Throws Error when the file system refuses.
void write_safetensors(const std::filesystem::path& path, std::vector<SafetensorsOutput> tensors);

}  // namespace cachalot
