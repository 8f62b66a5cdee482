// ShardIndex, by one walk over the text.
#include "io/shard_index.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/error.h"
#include "io/duplicates.h"
#include "io/json_scanner.h"

namespace cachalot {
namespace {

constexpr size_t kMaxBytes = 100'000'000, kMaxTensors = 1'000'000, kMaxFiles = 100'000, kMaxFileName = 255;
constexpr int kMaxDepth = 4;

// Shards lie beside the index: a name with a path in it could lead anywhere.
void check_file_name(const std::string& index, std::string_view file, bool escaped) {
  const bool plain = !escaped && !file.empty() && file.size() <= kMaxFileName && file.find_first_of("/\\:") == std::string_view::npos &&
                     file[0] != '.' && file.ends_with(".safetensors");
  if (!plain)
    fail("{}: weight_map: found the file name \"{}\", expected a plain name that ends in \".safetensors\"", index, printable(file));
}

}  // namespace

ShardIndex ShardIndex::open(const std::filesystem::path& path) {
  auto mapping = MappedFile::open(path);
  const auto bytes = mapping->bytes();
  if (bytes.size() > kMaxBytes) fail("{}: {} bytes, expected at most {}", path.string(), bytes.size(), kMaxBytes);
  ShardIndex out = from_text({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, path.string());
  out.mapping = std::move(mapping);
  return out;
}

ShardIndex ShardIndex::from_text(std::string_view text, std::string name) {
  ShardIndex out;
  out.name = std::move(name);
  JsonScanner scanner(text, out.name);
  std::map<std::string_view, uint32_t> files;
  bool has_map = false, has_metadata = false;
  const auto read_pair = [&](const JsonScanner::Text& tensor) {
    if (tensor.escaped || tensor.raw.empty())
      fail("{}: weight_map: found the tensor name \"{}\", expected plain characters", out.name, printable(tensor.raw));
    if (out.weight_map.size() >= kMaxTensors) fail("{}: weight_map: more than {} tensors", out.name, kMaxTensors);
    const auto file = scanner.string("a file name");
    check_file_name(out.name, file.raw, file.escaped);
    const auto [place, added] = files.emplace(file.raw, static_cast<uint32_t>(files.size()));
    if (files.size() > kMaxFiles) fail("{}: weight_map: more than {} files", out.name, kMaxFiles);
    out.weight_map.emplace_back(tensor.raw, place->second);
  };
  scanner.object([&](const JsonScanner::Text& key) {
    if (key.raw == "weight_map") {
      if (std::exchange(has_map, true)) fail("{}: the key \"weight_map\" appears twice", out.name);
      return scanner.object(read_pair);
    }
    if (key.raw == "metadata" && std::exchange(has_metadata, true)) fail("{}: the key \"metadata\" appears twice", out.name);
    scanner.skip_value(kMaxDepth);
  });
  scanner.expect_end();
  if (!has_map) fail("{}: the key \"weight_map\" is missing", out.name);
  if (out.weight_map.empty()) fail("{}: weight_map: found no tensor, expected at least one", out.name);
  const auto twice = first_duplicate(out.weight_map.size(), [&](size_t i) { return out.weight_map[i].first; });
  if (twice) fail("{}: weight_map: the tensor \"{}\" appears twice", out.name, printable(*twice));

  std::vector<uint32_t> place_of(files.size());  // from order of appearance to sorted order
  for (const auto& [file, appearance] : files) {
    place_of[appearance] = static_cast<uint32_t>(out.files.size());
    out.files.emplace_back(file);
  }
  for (auto& [tensor, file] : out.weight_map) file = place_of[file];
  return out;
}

}  // namespace cachalot
