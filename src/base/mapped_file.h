// MappedFile: a file mapped read-only into memory for as long as the object lives.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

namespace cachalot {

class MappedFile {
 public:
  // Throws Error naming the path when it cannot be opened, is not a regular file, is a Git LFS pointer, or cannot be mapped. An empty file
  // maps to no bytes.
  static std::shared_ptr<const MappedFile> open(const std::filesystem::path& path);
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  [[nodiscard]] std::span<const std::byte> bytes() const { return {data_, size_}; }
  [[nodiscard]] const std::string& path() const { return path_; }
  // Tells the system that these bytes will not be read again soon, so that their pages may be dropped. Bytes that lie elsewhere are left
  // alone.
  void forget(std::span<const std::byte> part) const;

 private:
  MappedFile() = default;
  std::string path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// The whole of a small text file (a config, a template). Throws Error when it is missing or larger than `limit` bytes.
std::string read_text_file(const std::filesystem::path& path, size_t limit = 64u << 20);

}  // namespace cachalot
