// AtomicFile on C streams.
#include "io/atomic_file.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "base/error.h"

namespace cachalot {

AtomicFile::AtomicFile(std::filesystem::path path, Kind kind) : path_(std::move(path)), temporary_(path_), kind_(kind) {
  if (kind_ == Kind::in_place) {
    file_ = std::fopen(path_.c_str(), "r+be");
  } else {
    temporary_ += fmt::format(".tmp{}", ::getpid());
  }
  if (file_ == nullptr) file_ = std::fopen(temporary_.c_str(), "w+be");
  if (file_ == nullptr) failed("create");
}

AtomicFile::~AtomicFile() {
  if (file_ == nullptr) return;
  std::fclose(file_);
  std::error_code ignored;
  if (kind_ == Kind::renamed) std::filesystem::remove(temporary_, ignored);
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  if (!bytes.empty() && std::fwrite(bytes.data(), 1, bytes.size(), file_) != bytes.size()) failed("write");
  position_ += bytes.size();
}

void AtomicFile::pad_to(uint64_t multiple) {
  const std::vector<std::byte> zeros((multiple - position_ % multiple) % multiple);
  write(zeros);
}

void AtomicFile::seek(uint64_t position) {
  if (::fseeko(file_, static_cast<off_t>(position), SEEK_SET) != 0) failed("seek in");
  position_ = position;
}

void AtomicFile::resize(uint64_t bytes) {
  if (std::fflush(file_) != 0 || ::ftruncate(::fileno(file_), static_cast<off_t>(bytes)) != 0) failed("reserve the size of");
}

void AtomicFile::sync() {
  if (std::fflush(file_) != 0 || ::fsync(::fileno(file_)) != 0) failed("write");
}

void AtomicFile::read_back(uint64_t at, std::span<std::byte> bytes) {
  if (std::fflush(file_) != 0) failed("write");
  const ssize_t n = ::pread(::fileno(file_), bytes.data(), bytes.size(), static_cast<off_t>(at));
  if (n < 0) failed("read back");
  if (static_cast<size_t>(n) != bytes.size())
    fail("{}: cannot read back the file: {} bytes at {}, expected {}", name(), n, at, bytes.size());
}

void AtomicFile::commit() {
  sync();
  const int closed = std::fclose(file_);
  file_ = nullptr;
  std::error_code error;
  if (closed == 0 && kind_ == Kind::renamed) std::filesystem::rename(temporary_, path_, error);
  if (closed == 0 && !error) return;
  const std::string reason = error ? error.message() : std::strerror(errno);
  std::filesystem::remove(temporary_, error);
  fail("{}: cannot put the finished file in its place: {}", name(), reason);
}

void AtomicFile::failed(const char* doing) { fail("{}: cannot {} the file: {}", name(), doing, std::strerror(errno)); }

void write_atomically(const std::filesystem::path& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

}  // namespace cachalot
