// ShardedWriter: the safetensors files of a model, written tensor by tensor in an order declared before, so that memory does not grow with
// the model and an interrupted run can go on where it stopped. The files have their full size from the start and an index beside them: a
// reader finds zeros where nothing was written yet.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cachalot {

class ShardedWriter {
 public:
  // Files go into `directory`, which must exist. A tensor larger than shard_bytes has a file of its own.
  ShardedWriter(std::filesystem::path directory, uint64_t shard_bytes);
  ~ShardedWriter();
  ShardedWriter(const ShardedWriter&) = delete;
  ShardedWriter& operator=(const ShardedWriter&) = delete;

  // Announces the next tensor; the shape is slowest first. A repeated name is an Error when writing begins.
  void declare(std::string name, std::string dtype, std::vector<int64_t> shape);
  [[nodiscard]] size_t n_declared() const { return tensors_.size(); }
  // Creates the files, or takes those of an earlier run, whose headers must be the same, and goes on behind its first n_written tensors.
  // Throws Error when the file system refuses or has too little room.
  void begin(size_t n_written = 0);
  // The whole of the next declared tensor, or of its next piece; `name` must be that tensor's.
  void write(std::string_view name, std::span<const std::byte> bytes);
  // All that was written is on the disk.
  void sync();
  // Every declared tensor must have been written. The files stay where they are.
  void finish();
  [[nodiscard]] uint64_t bytes() const { return total_bytes_; }  // of all tensors
  [[nodiscard]] size_t n_files() const { return shards_.size(); }

 private:
  struct Tensor {
    std::string name, dtype;
    std::vector<int64_t> shape;
    uint64_t bytes = 0, at = 0;  // at: in the data of its shard
    size_t shard = 0;
  };
  struct Shard {
    std::string file;
    std::string header;  // with its length in front
    uint64_t data_bytes = 0;
    int descriptor = -1;
  };
  void plan();
  void write_index() const;
  void open(Shard& shard, bool again) const;
  void put(const Shard& shard, uint64_t at, std::span<const std::byte> bytes) const;
  [[noreturn]] void failed(const Shard& shard, const char* doing) const;

  std::filesystem::path directory_;
  uint64_t shard_bytes_, total_bytes_ = 0;
  std::vector<Tensor> tensors_;
  std::vector<Shard> shards_;
  size_t current_ = 0;  // tensor that the next bytes belong to
  uint64_t written_of_it_ = 0;
};

}  // namespace cachalot
