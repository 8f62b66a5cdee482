// Reading a pack: prelude and trailer, header, then chunks by all cores.
#include "io/pack_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>

#include "base/error.h"
#include "base/hash.h"
#include "io/pack_format.h"

namespace cachalot {
namespace {

constexpr uint64_t kAlign = 4096;
constexpr uint64_t kMaxHeader = 256u << 20;
constexpr size_t kPiece = size_t{512} << 10;  // read and hashed while it is in the second cache

}  // namespace

std::shared_ptr<const PackFile> PackFile::open(const std::filesystem::path& path) {
  std::shared_ptr<PackFile> file(new PackFile());
  file->name_ = path.string();
  file->descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat status {};
  if (file->descriptor_ < 0 || ::fstat(file->descriptor_, &status) != 0) fail("{}: cannot open it: {}", file->name_, std::strerror(errno));
  if (!S_ISREG(status.st_mode)) fail("{}: not a regular file", file->name_);
  file->size_ = static_cast<uint64_t>(status.st_size);
  file->read_header();
  return file;
}

std::shared_ptr<const PackFile> PackFile::from_bytes(std::span<const std::byte> bytes, std::string name) {
  std::shared_ptr<PackFile> file(new PackFile());
  file->name_ = std::move(name);
  file->bytes_ = bytes;
  file->size_ = bytes.size();
  file->read_header();
  return file;
}

PackFile::~PackFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void PackFile::read_at(uint64_t at, std::span<std::byte> memory) const {
  if (descriptor_ < 0) {
    std::memcpy(memory.data(), bytes_.data() + at, memory.size());
    return;
  }
  while (!memory.empty()) {
    const ssize_t n = ::pread(descriptor_, memory.data(), memory.size(), static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("{}: cannot read it: {}", name_, std::strerror(errno));
    if (n == 0) fail("{}: the file became shorter while it was read", name_);
    memory = memory.subspan(static_cast<size_t>(n));
    at += static_cast<uint64_t>(n);
  }
}

void PackFile::read_header() {
  PackPrelude first{};
  PackTrailer last{};
  if (size_ < kPackMagic.size()) fail("{}: {} bytes, too few for a packed model", name_, size_);
  read_at(0, std::as_writable_bytes(std::span(&first, 1)).first(std::min<uint64_t>(size_, kPackEdge)));
  if (std::string_view(first.magic, sizeof first.magic) != kPackMagic)
    fail("{}: not a packed model: found \"{}\" at its begin, expected {}", name_,
         printable(std::string_view(first.magic, sizeof first.magic)), kPackMagic);
  if (first.byte_order == __builtin_bswap32(kPackByteOrder))
    fail("{}: packed on a machine with another byte order; pack the model here", name_);
  if (first.byte_order != kPackByteOrder)
    fail("{}: byte order mark: found {:#x}, expected {:#x}: damaged", name_, first.byte_order, kPackByteOrder);
  if (first.version != kPackVersion)
    fail("{}: packed in version {} of the form, expected {}; pack the model again", name_, first.version, kPackVersion);
  if (size_ < 2 * kPackEdge) fail("{}: {} bytes, cut short", name_, size_);
  read_at(size_ - kPackEdge, std::as_writable_bytes(std::span(&last, 1)));
  if (std::string_view(last.magic, sizeof last.magic) != kPackEndMagic || last.file_bytes != size_)
    fail("{}: its end is missing: cut short, or damaged", name_);
  if (last.header_at < kPackEdge || last.header_at > size_ - kPackEdge || last.header_bytes != size_ - kPackEdge - last.header_at ||
      last.header_bytes > kMaxHeader)
    fail("{}: the place of the header is impossible ({} bytes at {}): damaged", name_, last.header_bytes, last.header_at);
  std::string text(last.header_bytes, '\0');
  read_at(last.header_at, std::as_writable_bytes(std::span(text)));
  if (xxh3(std::as_bytes(std::span(text))) != last.header_hash) fail("{}: the header is damaged: its checksum differs", name_);
  header_ = parse_pack_header(text, name_, last.header_at);
  for (size_t i = 0; i < header_.linears.size(); ++i) by_name_.emplace(header_.linears[i].sources[0].name, i);
}

uint64_t PackFile::data_bytes() const {
  uint64_t total = 0;
  for (const PackLinear& linear : header_.linears)
    for (const PackBlob& buffer : linear.buffers) total += buffer.bytes;
  return total;
}

const PackLinear* PackFile::find(std::string_view first_name) const {
  const auto found = by_name_.find(first_name);
  return found == by_name_.end() ? nullptr : &header_.linears[found->second];
}

void PackFile::read(const PackBlob& blob, std::span<std::byte> memory, std::string_view what) const {
  const auto n_chunks = static_cast<int>(blob.hashes.size());
  std::atomic<bool> damaged{false};
  const auto chunk = [&](int index, int) {
    const size_t begin = static_cast<size_t>(index) * kPackChunk, end = std::min(begin + kPackChunk, memory.size());
    Xxh3 hash;
    for (size_t at = begin; at < end; at += kPiece) {
      const std::span<std::byte> piece = memory.subspan(at, std::min(kPiece, end - at));
      read_at(blob.at + at, piece);
      hash.add(piece);
    }
    if (hash.value() != blob.hashes[static_cast<size_t>(index)]) damaged.store(true);
  };
  if (n_chunks <= 1) {
    for (int i = 0; i < n_chunks; ++i) chunk(i, 0);
  } else {
    if (!pool_) pool_ = std::make_unique<ThreadPool>(0);
    pool_->run(n_chunks, std::ref(chunk));
  }
  if (damaged.load()) fail("{}: {} is damaged: its checksum differs; pack the model again", name_, what);
}

PackWriter::PackWriter(const std::filesystem::path& path) : file_(path) {
  PackPrelude first{};
  std::memcpy(first.magic, kPackMagic.data(), kPackMagic.size());
  first.version = kPackVersion;
  first.byte_order = kPackByteOrder;
  file_.write(std::as_bytes(std::span(&first, 1)));
}

PackBlob PackWriter::write(std::span<const std::byte> bytes) {
  file_.pad_to(kAlign);
  PackBlob blob{.at = file_.position(), .bytes = bytes.size(), .hashes = {}};
  for (size_t at = 0; at < bytes.size(); at += kPackChunk) {
    const auto chunk = bytes.subspan(at, std::min(kPackChunk, bytes.size() - at));
    blob.hashes.push_back(xxh3(chunk));
    file_.write(chunk);
  }
  return blob;
}

uint64_t hash_of_file(const std::filesystem::path& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) fail("{}: cannot open it: {}", path.string(), std::strerror(errno));
  Xxh3 hash;
  std::vector<std::byte> piece(kPackChunk);
  ssize_t n = 0;
  while ((n = ::read(descriptor, piece.data(), piece.size())) > 0 || (n < 0 && errno == EINTR))
    if (n > 0) hash.add(std::span(piece).first(static_cast<size_t>(n)));
  const int error = errno;
  ::close(descriptor);
  if (n < 0) fail("{}: cannot read it: {}", path.string(), std::strerror(error));
  return hash.value();
}

}  // namespace cachalot
