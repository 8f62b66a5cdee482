// Mappings with room to align, trimmed to the aligned part; small weights share chunks of 64 MiB, of which only touched pages cost memory.
#include "cpu/huge_memory.h"

#include <sys/mman.h>

#include <cstdint>

#include "base/error.h"

namespace cachalot::cpu {
namespace {

constexpr size_t kHugePage = size_t{2} << 20, kChunkBytes = size_t{64} << 20, kAlign = 64;

constexpr size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

}  // namespace

std::shared_ptr<std::byte> map_huge(size_t bytes) {
  const size_t size = round_up(bytes == 0 ? 1 : bytes, kHugePage), reserved = size + kHugePage;
  void* const start = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) fail("memory: found no room for {} MiB of weights", size >> 20);
  auto* const first = static_cast<std::byte*>(start);
  const size_t skipped = round_up(reinterpret_cast<uintptr_t>(start), kHugePage) - reinterpret_cast<uintptr_t>(start);
  std::byte* const aligned = first + skipped;
  if (skipped > 0) munmap(first, skipped);
  if (skipped < kHugePage) munmap(aligned + size, kHugePage - skipped);
  madvise(aligned, size, MADV_HUGEPAGE);  // a wish: without huge pages everything works, more slowly
  return {aligned, [size](std::byte* p) { munmap(p, size); }};
}

std::shared_ptr<std::byte> HugeMemory::take(size_t bytes) {
  bytes = round_up(bytes, kAlign);
  if (bytes >= kChunkBytes / 2) return map_huge(bytes);
  if (chunk_ == nullptr || bytes > size_ - used_) {
    chunk_ = map_huge(kChunkBytes);
    size_ = kChunkBytes;
    used_ = 0;
  }
  std::shared_ptr<std::byte> out(chunk_, chunk_.get() + used_);
  used_ += bytes;
  return out;
}

}  // namespace cachalot::cpu
