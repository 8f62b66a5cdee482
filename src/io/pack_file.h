// PackFile: weights in the form that one device keeps them in, so that loading is reading. docs/packed-files.md has the layout.
//
//   64 bytes: magic, version, byte order     data, each part aligned to 4096     header (JSON)     64 bytes: where the header is, its hash
//
// All data is hashed in chunks of 4 MiB, which are read and checked in parallel. Everything in the header is checked before it is used.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/thread_pool.h"
#include "io/atomic_file.h"
#include "tensor/linear_source.h"

namespace cachalot {

inline constexpr int kPackVersion = 1;
inline constexpr size_t kPackChunk = size_t{4} << 20;

// A run of bytes in the file.
struct PackBlob {
  uint64_t at = 0, bytes = 0;
  std::vector<uint64_t> hashes;  // XXH3-64 of each chunk
};

// One matrix, or stack of them, that went into a packed Linear.
struct PackSource {
  std::string name;  // GGUF's name for it
  Format format = Format::f32;
  int n_matrices = 1, out = 0, in = 0, group = 0;
};

struct PackLinear {
  std::vector<PackSource> sources;  // its row segments
  PackBlob description;             // of the device's own making
  std::vector<PackBlob> buffers;
};

// A file of the model that the pack was made from, or one that lies beside the pack.
struct PackNote {
  std::string file;
  uint64_t bytes = 0, hash = 0;
  int64_t mtime_ns = 0;
};

struct PackHeader {
  std::string layout;     // Ops::packed_layout() of the device that wrote it
  std::string container;  // "gguf" or "safetensors": which kind of companions holds the configuration
  int rank = 0, n_ranks = 1;
  std::vector<PackNote> sources, companions;
  std::vector<std::pair<std::string, PackBlob>> vectors;  // f32: norms, biases
  std::vector<PackLinear> linears;
};

// The header's text, checked: every blob lies in [64, data_end), names are unique, shapes and counts are possible. Throws Error.
PackHeader parse_pack_header(std::string_view json, const std::string& file, uint64_t data_end);

class PackFile {
 public:
  // Throws Error naming the file and what is wrong: not a pack, another version or byte order, cut short, damaged.
  static std::shared_ptr<const PackFile> open(const std::filesystem::path& path);
  // A whole file in memory, which must outlive the result.
  static std::shared_ptr<const PackFile> from_bytes(std::span<const std::byte> bytes, std::string name);
  ~PackFile();

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const PackHeader& header() const { return header_; }
  [[nodiscard]] uint64_t data_bytes() const;  // of all linears
  // The Linear whose first segment has this name; null when there is none.
  [[nodiscard]] const PackLinear* find(std::string_view first_name) const;
  // Fills `memory` (blob.bytes) and checks it. `what` names it in the error when the bytes are damaged.
  void read(const PackBlob& blob, std::span<std::byte> memory, std::string_view what) const;

 private:
  PackFile() = default;
  void read_header();
  void read_at(uint64_t at, std::span<std::byte> memory) const;

  std::string name_;
  int descriptor_ = -1;
  std::span<const std::byte> bytes_;  // when there is no descriptor
  uint64_t size_ = 0;
  PackHeader header_;
  std::unordered_map<std::string_view, size_t> by_name_;
  mutable std::unique_ptr<ThreadPool> pool_;  // made by the first large read
};

// Writes a pack; it appears under its name when it is complete.
class PackWriter {
 public:
  explicit PackWriter(const std::filesystem::path& path);

  PackBlob write(std::span<const std::byte> bytes);
  void commit(const PackHeader& header);
  [[nodiscard]] uint64_t position() const { return file_.position(); }

 private:
  AtomicFile file_;
};

// XXH3-64 of a whole file. Throws Error when it cannot be read.
uint64_t hash_of_file(const std::filesystem::path& path);

}  // namespace cachalot
