// Memory of this machine: what there is, and what a program may still take, control groups included.
#pragma once

#include <cstddef>
#include <filesystem>

namespace cachalot {

struct MemorySize {
  size_t total = 0;
  size_t free = 0;  // what can be taken now; file caches count as free
};

// The smaller of the machine's and of every control group's (version 2, or 1) that this process is in. Zeros where the kernel tells
// nothing. `root` takes the place of "/" in tests.
MemorySize system_memory(const std::filesystem::path& root = "/");

}  // namespace cachalot
