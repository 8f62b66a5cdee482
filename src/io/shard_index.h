// ShardIndex: model.safetensors.index.json, which says in which file each tensor of a sharded model is.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/mapped_file.h"

namespace cachalot {

struct ShardIndex {
  std::string name;                                               // of the index file
  std::vector<std::string> files;                                 // sorted; plain file names, each ending in ".safetensors"
  std::vector<std::pair<std::string_view, uint32_t>> weight_map;  // tensor name and its place in `files`
  std::shared_ptr<const MappedFile> mapping;                      // what the names point into

  // Throws Error on anything but {"metadata": any, "weight_map": {name: file}}; a file name with a path in it, a tensor named
  // twice, and more than 10^6 tensors are refused.
  static ShardIndex open(const std::filesystem::path& path);
  // Text held in memory, which must outlive the result.
  static ShardIndex from_text(std::string_view text, std::string name);
};

}  // namespace cachalot
