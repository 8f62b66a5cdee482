// Builders of GGUF and safetensors files byte by byte, so that tests can set every field to anything; and the check that a bad file
// is refused quickly with an Error that names the file and what is wrong.
#pragma once

#include <gmock/gmock.h>
#include <sys/resource.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "support/support.h"

namespace cachalot::test {

class Bytes {
 public:
  template <typename T>
  Bytes& number(T value) {
    data_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Bytes& text(std::string_view text) { return number(static_cast<uint64_t>(text.size())).raw(text); }  // GGUF's strings
  Bytes& raw(std::string_view text) {
    data_ += text;
    return *this;
  }
  Bytes& pad(size_t multiple) {
    data_.resize((data_.size() + multiple - 1) / multiple * multiple);
    return *this;
  }
  [[nodiscard]] const std::string& str() const { return data_; }

 private:
  std::string data_;
};

template <typename T>
std::string packed(T value) {
  return Bytes().number(value).str();
}
inline std::string packed_text(std::string_view text) { return Bytes().text(text).str(); }
// A GGUF array value: element type, count (of its own when given), elements.
inline std::string packed_array(int32_t type, uint64_t n, const std::string& elements) {
  return Bytes().number(type).number(n).raw(elements).str();
}

// GGUF type ids, by their places in the format.
enum : int32_t { kU8, kI8, kU16, kI16, kU32, kI32, kF32, kBool, kString, kArray, kU64, kI64, kF64 };

struct GgufImage {
  struct Key {
    std::string name;
    int32_t type;
    std::string value;
  };
  struct Tensor {
    std::string name;
    std::vector<int64_t> ne;  // fastest first
    int32_t type = 0;
    uint64_t offset = 0;
    std::optional<uint32_t> n_dims = {};
    std::optional<uint64_t> name_size = {};
  };
  std::string magic = "GGUF";
  uint32_t version = 3;
  std::optional<int64_t> n_tensors, n_keys;
  std::vector<Key> keys;
  std::vector<Tensor> tensors;
  size_t alignment = 32;
  std::string data;

  Key& key(std::string_view name) {
    for (Key& key : keys) {
      if (key.name == name) return key;
    }
    keys.push_back({std::string(name), kU32, packed(uint32_t{0})});
    return keys.back();
  }
  void set(std::string_view name, int32_t type, std::string value) {
    Key& entry = key(name);
    entry.type = type;
    entry.value = std::move(value);
  }

  // Everything before the data, without padding.
  [[nodiscard]] std::string table() const {
    Bytes out;
    out.raw(magic).number(version);
    out.number(n_tensors.value_or(static_cast<int64_t>(tensors.size()))).number(n_keys.value_or(static_cast<int64_t>(keys.size())));
    for (const Key& key : keys) out.text(key.name).number(key.type).raw(key.value);
    for (const Tensor& tensor : tensors) {
      out.number(tensor.name_size.value_or(tensor.name.size())).raw(tensor.name);
      out.number(tensor.n_dims.value_or(static_cast<uint32_t>(tensor.ne.size())));
      for (const int64_t n : tensor.ne) out.number(n);
      out.number(tensor.type).number(tensor.offset);
    }
    return out.str();
  }
  [[nodiscard]] std::string build() const { return Bytes().raw(table()).pad(alignment).raw(data).str(); }
};

// A small sound file: two f32 tensors, the usual tokenizer arrays.
inline GgufImage sound_gguf() {
  GgufImage out;
  out.keys = {{"general.architecture", kString, packed_text("llama")},
              {"general.alignment", kU32, packed(uint32_t{32})},
              {"tokenizer.ggml.tokens", kArray, packed_array(kString, 2, packed_text("a") + packed_text("b"))},
              {"tokenizer.ggml.scores", kArray, packed_array(kF32, 2, packed(0.5f) + packed(-1.0f))},
              {"tokenizer.ggml.token_type", kArray, packed_array(kI32, 2, packed(int32_t{1}) + packed(int32_t{3}))}};
  out.tensors = {{"token_embd.weight", {8, 4}, 0, 0}, {"output_norm.weight", {8}, 0, 128}};
  for (int i = 0; i < 40; ++i) out.data += packed(static_cast<float>(i));
  return out;
}

// header length, header, data
inline std::string safetensors_image(std::string_view header, std::string_view data, std::optional<uint64_t> header_size = {}) {
  return Bytes().number(header_size.value_or(header.size())).raw(header).raw(data).str();
}

struct BadFile {
  std::string name;  // of the case
  std::function<std::string()> bytes;
  std::vector<std::string> fragments;  // of the message
};

inline void PrintTo(const BadFile& file, std::ostream* out) { *out << file.name; }

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kCountMemory = false;  // the sanitizer's own memory would be counted
#elif defined(__has_feature)
constexpr bool kCountMemory = !__has_feature(address_sanitizer);
#else
constexpr bool kCountMemory = true;
#endif

// Most memory that this process has held so far, in bytes.
inline int64_t peak_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

// The file must be refused in less than a second and 100 MB with an Error that has the file's name and every fragment.
inline void expect_refused(const std::string& file, const std::vector<std::string>& fragments, const std::function<void()>& open) {
  const int64_t memory = peak_memory();
  const auto start = std::chrono::steady_clock::now();
  const std::string error = error_of(open);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  EXPECT_THAT(error, ::testing::HasSubstr(file));
  for (const std::string& fragment : fragments) EXPECT_THAT(error, ::testing::HasSubstr(fragment));
  EXPECT_EQ(error.find('\n'), std::string::npos) << error;
  EXPECT_LT(seconds.count(), 1.0) << error;
  if (kCountMemory) {
    EXPECT_LT(peak_memory() - memory, 100'000'000) << error;
  }
}

}  // namespace cachalot::test
