// ShardedWriter on file descriptors.
#include "io/sharded_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/error.h"
#include "io/atomic_file.h"
#include "io/duplicates.h"
#include "io/safetensors.h"

namespace cachalot {
namespace {

constexpr size_t kAlignment = 8;

}  // namespace

ShardedWriter::ShardedWriter(std::filesystem::path directory, uint64_t shard_bytes)
    : directory_(std::move(directory)), shard_bytes_(shard_bytes) {}

ShardedWriter::~ShardedWriter() {
  for (const Shard& shard : shards_)
    if (shard.descriptor >= 0) ::close(shard.descriptor);
}

void ShardedWriter::failed(const Shard& shard, const char* doing) const {
  const int error = errno;
  fail("{}: cannot {} the file: {}", (directory_ / shard.file).string(), doing, std::strerror(error));
}

void ShardedWriter::declare(std::string name, std::string dtype, std::vector<int64_t> shape) {
  CACHALOT_CHECK(shards_.empty(), "{} declared after writing began", name);
  const SafetensorsDtype* const type = find_safetensors_dtype(dtype);
  CACHALOT_CHECK(type != nullptr && type->bits % 8 == 0, "tensor {} of dtype {}", name, dtype);
  auto bytes = static_cast<uint64_t>(type->bits / 8);
  for (const int64_t dim : shape) {
    CACHALOT_CHECK(dim > 0, "tensor {}: a dimension of {}", name, dim);
    bytes *= static_cast<uint64_t>(dim);
  }
  tensors_.push_back({std::move(name), std::move(dtype), std::move(shape), bytes});
  total_bytes_ += bytes;
}

// Tensors to shards in order, and the headers.
void ShardedWriter::plan() {
  const auto twice = first_duplicate(tensors_.size(), [this](size_t i) { return std::string_view(tensors_[i].name); });
  if (twice) fail("{}: tensor \"{}\" appears twice", directory_.string(), *twice);
  CACHALOT_CHECK(!tensors_.empty());
  for (Tensor& tensor : tensors_) {
    if (shards_.empty() || (shards_.back().data_bytes > 0 && shards_.back().data_bytes + tensor.bytes > shard_bytes_))
      shards_.emplace_back();
    tensor.shard = shards_.size() - 1;
    tensor.at = shards_.back().data_bytes;
    shards_.back().data_bytes += tensor.bytes;
  }
  for (size_t s = 0; s < shards_.size(); ++s) {
    std::string text = R"({"__metadata__":{"format":"pt"})";
    for (const Tensor& tensor : tensors_) {
      if (tensor.shard != s) continue;
      text += fmt::format(R"(,{}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", nlohmann::json(tensor.name).dump(), tensor.dtype,
                          fmt::join(tensor.shape, ","), tensor.at, tensor.at + tensor.bytes);
    }
    text += '}';
    text.resize((text.size() + kAlignment - 1) / kAlignment * kAlignment, ' ');
    const uint64_t size = text.size();
    std::string& header = shards_[s].header;
    header.assign(reinterpret_cast<const char*>(&size), sizeof size);
    header += text;
    shards_[s].file = shards_.size() == 1 ? "model.safetensors" : fmt::format("model-{:05}-of-{:05}.safetensors", s + 1, shards_.size());
  }
}

void ShardedWriter::write_index() const {
  nlohmann::ordered_json index{{"metadata", {{"total_size", total_bytes_}}}, {"weight_map", nlohmann::ordered_json::object()}};
  for (const Tensor& tensor : tensors_) index["weight_map"][tensor.name] = shards_[tensor.shard].file;
  write_atomically(directory_ / "model.safetensors.index.json", index.dump(2) + "\n");
}

void ShardedWriter::open(Shard& shard, bool again) const {
  const std::filesystem::path path = directory_ / shard.file;
  shard.descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC | (again ? 0 : O_CREAT | O_TRUNC), 0666);
  if (shard.descriptor < 0) failed(shard, again ? "open" : "create");
  const auto size = static_cast<off_t>(shard.header.size() + shard.data_bytes);
  if (!again) {
    if (::ftruncate(shard.descriptor, size) != 0) failed(shard, "reserve the size of");
    put(shard, 0, std::as_bytes(std::span(shard.header)));
    return;
  }
  std::string found(shard.header.size(), '\0');
  const bool same = ::lseek(shard.descriptor, 0, SEEK_END) == size &&
                    ::pread(shard.descriptor, found.data(), found.size(), 0) == static_cast<ssize_t>(found.size()) && found == shard.header;
  if (!same) fail("{}: is not what this model's first part would be: it cannot be gone on with", path.string());
}

void ShardedWriter::begin(size_t n_written) {
  CACHALOT_CHECK(n_written <= tensors_.size(), "{} of {} tensors", n_written, tensors_.size());
  plan();
  uint64_t left = 0;
  for (size_t i = n_written; i < tensors_.size(); ++i) left += tensors_[i].bytes;
  std::error_code error;
  const auto space = std::filesystem::space(directory_, error);
  if (!error && space.available < left)
    fail("{}: {} bytes are free on the file system, expected {} for the weights", directory_.string(), space.available, left);
  for (Shard& shard : shards_) open(shard, n_written > 0);
  if (shards_.size() > 1) write_index();
  current_ = n_written;
}

void ShardedWriter::put(const Shard& shard, uint64_t at, std::span<const std::byte> bytes) const {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(shard.descriptor, bytes.data(), bytes.size(), static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) failed(shard, "write");
    at += static_cast<uint64_t>(n);
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
}

void ShardedWriter::write(std::string_view name, std::span<const std::byte> bytes) {
  CACHALOT_CHECK(current_ < tensors_.size(), "{} behind the last tensor", name);
  const Tensor& tensor = tensors_[current_];
  CACHALOT_CHECK(tensor.name == name && bytes.size() <= tensor.bytes - written_of_it_, "{} bytes of {}, expected {} of {}", bytes.size(),
                 name, tensor.bytes - written_of_it_, tensor.name);
  const Shard& shard = shards_[tensor.shard];
  put(shard, shard.header.size() + tensor.at + written_of_it_, bytes);
  written_of_it_ += bytes.size();
  if (written_of_it_ < tensor.bytes) return;
  written_of_it_ = 0;
  ++current_;
}

void ShardedWriter::sync() {
  for (const Shard& shard : shards_)
    if (::fsync(shard.descriptor) != 0) failed(shard, "write");
}

void ShardedWriter::finish() {
  CACHALOT_CHECK(current_ == tensors_.size(), "{} of {} tensors written", current_, tensors_.size());
  sync();
  for (Shard& shard : shards_) {
    const int descriptor = std::exchange(shard.descriptor, -1);
    if (::close(descriptor) != 0) failed(shard, "close");
  }
}

}  // namespace cachalot
