// AtomicFile: a file written piece by piece beside its place and renamed into it when complete, so that no reader sees half of it.
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace cachalot {

class AtomicFile {
 public:
  // in_place: the folder is temporary itself. The file has its own name from the start, one of an earlier run is gone on with, and it stays
  // when it is abandoned.
  enum class Kind : uint8_t { renamed, in_place };
  // Creates the temporary file. Throws Error naming the path.
  explicit AtomicFile(std::filesystem::path path, Kind kind = Kind::renamed);
  ~AtomicFile();  // removes the temporary file unless commit() succeeded
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  void pad_to(uint64_t multiple);  // with zero bytes
  void seek(uint64_t position);
  void resize(uint64_t bytes);  // what was not written is zero
  void sync();                  // what was written is on the disk
  // Reads bytes that were written, from the file. Throws Error when they are not there.
  void read_back(uint64_t at, std::span<std::byte> bytes);
  [[nodiscard]] uint64_t position() const { return position_; }
  [[nodiscard]] std::string name() const { return path_.string(); }
  // Closes the file, its bytes on the disk, and puts it in its place.
  void commit();

 private:
  [[noreturn]] void failed(const char* doing);

  std::filesystem::path path_, temporary_;
  Kind kind_;
  std::FILE* file_ = nullptr;
  uint64_t position_ = 0;
};

// A whole file at once.
void write_atomically(const std::filesystem::path& path, std::string_view text);

}  // namespace cachalot
