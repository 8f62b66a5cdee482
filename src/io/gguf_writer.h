// GgufWriter: writes a GGUF v3 file. Metadata and the table of tensors come first, then the bytes stream through, so that memory
// does not grow with the file. The file appears under its name only when it is complete.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/atomic_file.h"
#include "io/gguf.h"

namespace cachalot {

class GgufWriter {
 public:
  // Throws Error naming the path when it cannot be created.
  explicit GgufWriter(const std::filesystem::path& path, AtomicFile::Kind kind = AtomicFile::Kind::renamed);

  // A metadata value; setting a key again replaces it. "general.alignment" (u32) changes the alignment from 32.
  void set(std::string_view key, GgufValue value);
  void set_string(std::string_view key, std::string value);
  void set_u32(std::string_view key, uint32_t value);
  void set_f32(std::string_view key, float value);
  void set_bool(std::string_view key, bool value);
  void set_strings(std::string_view key, std::vector<std::string> values);
  void set_i32s(std::string_view key, std::vector<int64_t> values);
  void set_f32s(std::string_view key, std::vector<double> values);

  // Announces a tensor; shape is slowest first, as PyTorch writes it (at most 4 dimensions, rows of whole blocks, a name of 1 to 63
  // bytes that no other has: Error otherwise).
  void declare(std::string name, Format format, std::vector<int64_t> shape);
  [[nodiscard]] size_t n_declared() const { return tensors_.size(); }
  // Writes the header of a file that is made in place, gives the file its full size, so that it can be read while it grows, and goes on
  // behind its first n_written tensors.
  void begin(size_t n_written);
  void sync() { file_.sync(); }
  // Bytes of the next declared tensor, in pieces of any size; a piece must not reach into the following tensor.
  void write(std::span<const std::byte> bytes);
  // Ends the file and puts it in its place; every declared tensor must have been written. Before that a piece of each tensor is read back
  // and compared: Error when one is not what was written.
  void commit();

 private:
  struct Declared {
    std::string name;
    Format format;
    std::vector<int64_t> shape;
    uint64_t bytes;
  };
  struct Sample {  // the first bytes of a tensor
    uint64_t at = 0;
    std::vector<std::byte> bytes;
  };
  void check_samples();
  void write_header();
  void write_value(const GgufValue& value);
  void write_array(const GgufArray& array);
  void write_integer(GgufType type, int64_t value);
  void write_real(GgufType type, double value);
  void write_text(std::string_view text);
  template <typename T>
  void write_number(T value);

  AtomicFile file_;
  std::vector<std::pair<std::string, GgufValue>> metadata_;
  std::vector<Declared> tensors_;
  std::vector<Sample> samples_;  // of the tensors that were begun
  size_t first_ = 0;             // of those
  uint64_t alignment_ = 32;
  bool has_header_ = false;
  size_t current_ = 0;  // tensor that the next bytes belong to
  uint64_t written_of_it_ = 0;
};

}  // namespace cachalot
