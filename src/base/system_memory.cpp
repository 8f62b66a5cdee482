// Reads /proc/meminfo and the control groups' files; what is missing or not a number is no limit.
#include "base/system_memory.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

namespace cachalot {
namespace {
namespace fs = std::filesystem;

std::string text_of(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

// The number behind `key` at the start of a line; with an empty key, the text's own.
std::optional<size_t> number_at(const std::string& text, const std::string& key) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind(key, 0) != 0) continue;
    const size_t at = line.find_first_not_of(" \t", key.size());
    size_t value = 0;
    if (at == std::string::npos) return {};
    const auto [end, problem] = std::from_chars(line.data() + at, line.data() + line.size(), value);
    return problem == std::errc() ? std::optional(value) : std::nullopt;
  }
  return {};
}

// What one group's files say: its limit, and what of it is not used. Its file cache can be dropped, so that does not count as used.
void limit(const fs::path& limit_file, const fs::path& used_file, const fs::path& stat_file, const char* cache_key, MemorySize& memory) {
  const auto most = number_at(text_of(limit_file), ""), used = number_at(text_of(used_file), "");
  if (!most || !used || *most >= memory.total) return;  // "max", or a number too large to mean anything
  const size_t cache = number_at(text_of(stat_file), cache_key).value_or(0), held = *used - std::min(*used, cache);
  memory.total = *most;
  memory.free = std::min(memory.free, *most - std::min(*most, held));
}

}  // namespace

MemorySize system_memory(const fs::path& root) {
  const std::string info = text_of(root / "proc/meminfo");
  MemorySize memory{number_at(info, "MemTotal:").value_or(0) << 10, number_at(info, "MemAvailable:").value_or(0) << 10};
  std::istringstream groups(text_of(root / "proc/self/cgroup"));  // lines of "id:controllers:path"
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool version2 = controllers.empty();
    if (!version2 && ("," + controllers + ",").find(",memory,") == std::string::npos) continue;
    const fs::path base = root / (version2 ? "sys/fs/cgroup" : "sys/fs/cgroup/memory");
    // In a container the group's own folder is often mounted as the root, so every ancestor down to it is asked.
    fs::path group = fs::path(line.substr(second + 1)).relative_path();
    for (bool last = false; !last; group = group.parent_path()) {
      last = group.empty();
      const fs::path folder = base / group;
      if (version2)
        limit(folder / "memory.max", folder / "memory.current", folder / "memory.stat", "inactive_file ", memory);
      else
        limit(folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes", folder / "memory.stat", "total_inactive_file ", memory);
    }
  }
  return memory;
}

}  // namespace cachalot
