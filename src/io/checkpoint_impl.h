// What the two kinds of Checkpoint share. Internal to io/.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/mapped_file.h"
#include "io/checkpoint.h"

namespace cachalot {

struct StringHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
};
template <typename T>
using StringMap = std::unordered_map<std::string, T, StringHash, std::equal_to<>>;

std::unique_ptr<Checkpoint> open_gguf_checkpoint(const std::filesystem::path& path, std::string name);

// Where a safetensors model is: its index, or the one file.
struct SafetensorsPlace {
  std::filesystem::path directory;  // of config.json and its companions
  std::filesystem::path file;       // the index when `indexed`, otherwise the only tensor file
  bool indexed = false;
  std::string name;  // the path given
};
std::unique_ptr<Checkpoint> open_safetensors_checkpoint(const SafetensorsPlace& place);

// Throws Error unless the tensor has exactly this shape.
void check_shape(const TensorInfo& tensor, const std::vector<int64_t>& expected);
// Throws Error naming the stored type when no Format stands for it.
void check_readable(const TensorInfo& tensor);
// Forgets those stored bytes of the source that lie in this mapping.
void forget_in(const MappedFile& mapping, const LinearSource& source);
// A 1-D tensor as f32.
std::vector<float> read_vector(const TensorInfo& tensor, int n);

}  // namespace cachalot
