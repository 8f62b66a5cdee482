// GgufFile: the metadata and tensor table of a GGUF v3 file, whole or split, checked before anything is believed.
// Format: ggml's docs/gguf.md; limits of our own: alignment 8 to 1 MiB, 2^16 keys, 2^20 tensors, every length within the bytes left,
// and over all keys together 1.5 million strings in arrays, 16 MiB of string bytes and 2^21 numbers in arrays.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/mapped_file.h"
#include "io/checkpoint.h"

namespace cachalot {

// A metadata value. Integers of every width are held as int64_t (u64 above 2^63 - 1 is refused); the stored type is kept for writing.
enum class GgufType : int32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };
struct GgufArray {
  GgufType element = GgufType::u8;
  std::variant<std::vector<int64_t>, std::vector<double>, std::vector<std::string>> values;  // integers and booleans; floats; strings
};
struct GgufValue {
  GgufType type = GgufType::u32;
  std::variant<int64_t, double, bool, std::string, GgufArray> value;
};

class GgufFile {
 public:
  // Opens the file, or all parts of a split one given any part. Throws Error naming file and field.
  static std::shared_ptr<const GgufFile> open(const std::filesystem::path& path);
  // A whole file held in memory, which must outlive the result. `name` starts every error message.
  static std::shared_ptr<const GgufFile> from_bytes(std::span<const std::byte> bytes, std::string name);

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const std::vector<std::pair<std::string, GgufValue>>& metadata() const { return metadata_; }
  [[nodiscard]] const GgufValue* find(std::string_view key) const;
  [[nodiscard]] const std::vector<TensorInfo>& tensors() const { return tensors_; }
  [[nodiscard]] const std::vector<std::shared_ptr<const MappedFile>>& parts() const { return parts_; }

  // Typed getters; a present key of another type throws Error naming the key, what was found and what was expected.
  [[nodiscard]] std::optional<int64_t> integer(std::string_view key) const;
  [[nodiscard]] std::optional<double> number(std::string_view key) const;  // integers are accepted
  [[nodiscard]] std::optional<bool> boolean(std::string_view key) const;
  [[nodiscard]] std::optional<std::string> string(std::string_view key) const;
  [[nodiscard]] const std::vector<std::string>* strings(std::string_view key) const;
  [[nodiscard]] const std::vector<int64_t>* integers(std::string_view key) const;
  [[nodiscard]] const std::vector<double>* numbers(std::string_view key) const;

 private:
  friend class GgufReader;
  std::string name_;
  std::vector<std::pair<std::string, GgufValue>> metadata_;
  std::vector<TensorInfo> tensors_;
  std::vector<std::shared_ptr<const MappedFile>> parts_;
};

}  // namespace cachalot
