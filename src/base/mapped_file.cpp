// MappedFile and whole-file helpers, on POSIX calls.
#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <string_view>

#include "base/error.h"

namespace cachalot {
namespace fs = std::filesystem;
namespace {

// What a clone without Git LFS has in the place of a large file.
bool is_lfs_pointer(std::span<const std::byte> bytes) {
  constexpr std::string_view kBegin = "version https://git-lfs.github.com/spec/";
  return bytes.size() > kBegin.size() && bytes.size() < 1024 && std::memcmp(bytes.data(), kBegin.data(), kBegin.size()) == 0;
}

}  // namespace

std::shared_ptr<const MappedFile> MappedFile::open(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) fail("{}: cannot open: {}", path.string(), std::strerror(errno));
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    fail("{}: not a regular file", path.string());
  }
  std::shared_ptr<MappedFile> file(new MappedFile);
  file->path_ = path.string();
  file->size_ = static_cast<size_t>(info.st_size);
  if (file->size_ != 0) {
    void* data = ::mmap(nullptr, file->size_, PROT_READ, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) {
      const int error = errno;
      ::close(fd);
      file->size_ = 0;
      fail("{}: cannot map {} bytes: {}", path.string(), info.st_size, std::strerror(error));
    }
    file->data_ = static_cast<const std::byte*>(data);
  }
  ::close(fd);
  if (is_lfs_pointer(file->bytes())) fail("{}: a Git LFS pointer in place of the file; get it with git lfs pull", path.string());
  return file;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

void MappedFile::forget(std::span<const std::byte> part) const {
  const std::less_equal<> before;  // of pointers into whatever memory
  if (!before(data_, part.data()) || !before(part.data() + part.size(), data_ + size_)) return;
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<uintptr_t>(part.data()) + page - 1) & ~(page - 1);
  const auto end = (reinterpret_cast<uintptr_t>(part.data()) + part.size()) & ~(page - 1);
  if (end > begin) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

std::string read_text_file(const fs::path& path, size_t limit) {
  const auto file = MappedFile::open(path);
  if (file->bytes().size() > limit) fail("{}: {} bytes, expected at most {}", path.string(), file->bytes().size(), limit);
  return {reinterpret_cast<const char*>(file->bytes().data()), file->bytes().size()};
}

}  // namespace cachalot
