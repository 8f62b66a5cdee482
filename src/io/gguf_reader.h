// GgufReader: checks the bytes of one GGUF file (or part of a split one), then hands out what they hold.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/gguf.h"

namespace cachalot {

// The word for a metadata type in messages: "u32", "string".
std::string_view gguf_value_type_name(GgufType type);
// Bytes of a scalar of fixed size; 0 for strings and arrays.
size_t gguf_scalar_bytes(GgufType type);

class GgufReader {
 public:
  // Walks the whole file and throws Error naming `file` and the field at the first fault. Keeps 72 bytes per tensor and 32 per key.
  GgufReader(std::span<const std::byte> bytes, const std::string& file);

  // split.no (0-based), split.count and split.tensors.count; a file that is not split is part 0 of 1 with its own tensors.
  struct Split {
    int64_t number = 0, count = 1, n_tensors = 0;
  };
  [[nodiscard]] const Split& split() const { return split_; }
  [[nodiscard]] size_t n_tensors() const { return tensors_.size(); }
  // general.architecture, or "" (parts after the first need not have it).
  [[nodiscard]] std::string architecture() const;

  // Everything of a file that is not split.
  void append_whole(GgufFile& out) const;
  void append_tensors(GgufFile& out) const;
  void append_metadata(GgufFile& out) const;

 private:
  struct Key {
    std::string_view name;
    GgufType type = GgufType::u32;
    size_t value_at = 0;
  };
  struct Tensor {
    std::string_view name;
    std::array<int64_t, 4> ne{};  // fastest first
    uint64_t offset = 0;          // from the start of the data
    int n_dims = 0;
    Format format = Format::f32;
  };

  void read_header();
  void read_keys(uint64_t n);
  void read_tensors(uint64_t n);
  void check_known_keys();
  void check_data();
  Tensor read_tensor();
  uint64_t tensor_bytes(const Tensor& tensor) const;

  template <typename T>
  T take(std::string_view what);
  std::string_view take_text(std::string_view what, size_t max_size);
  GgufType take_type(std::string_view what);
  void skip_value(const Key& key);
  void skip_array(const Key& key);
  void skip_scalars(const Key& key, GgufType type, uint64_t n);

  [[nodiscard]] const Key* find(std::string_view name) const;
  [[nodiscard]] GgufValue value(const Key& key) const;
  [[nodiscard]] GgufArray array_value(size_t at) const;
  // The element type of an array key; u8 and false when it is another type.
  [[nodiscard]] bool array_head(const Key& key, GgufType& element, uint64_t& n) const;
  [[nodiscard]] int64_t integer_or(std::string_view name, int64_t fallback) const;
  template <typename T>
  [[nodiscard]] T load(size_t at) const;
  [[nodiscard]] int64_t load_integer(GgufType type, size_t at) const;
  [[nodiscard]] std::string load_string(size_t at) const;

  std::span<const std::byte> bytes_;
  const std::string& file_;
  size_t at_ = 0;
  uint64_t alignment_ = 32, n_keys_ = 0, n_tensors_ = 0;
  uint64_t n_strings_ = 0, n_string_bytes_ = 0, n_numbers_ = 0;  // against the limits, over all keys
  std::vector<Key> keys_;
  std::vector<Tensor> tensors_;
  size_t data_at_ = 0;
  Split split_;
};

}  // namespace cachalot
