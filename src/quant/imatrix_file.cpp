// The two file formats of importance matrices. Little-endian both.
//   GGUF: general.type "imatrix", imatrix.datasets (strings), imatrix.chunk_count and imatrix.chunk_size (u32); for each weight two f32
//         tensors, NAME.in_sum2 [rows, width] and NAME.counts [rows, 1].
//   dat:  i32 entries; each: i32 length and bytes of the name, i32 windows, i32 numbers, f32 numbers, each the mean square times the
//         windows; then i32 windows of the whole, i32 length and bytes of the text's name (a file may end before these).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "base/mapped_file.h"
#include "io/atomic_file.h"
#include "io/gguf.h"
#include "io/gguf_writer.h"
#include "quant/imatrix.h"

namespace cachalot {
namespace {

constexpr std::string_view kSums = ".in_sum2", kCounts = ".counts";

std::vector<float> floats_of(const TensorInfo& tensor, const std::string& file) {
  if (!tensor.has_format || tensor.format != Format::f32)
    fail("{}: {}: found {}, expected F32", file, printable(tensor.name), tensor.dtype);
  std::vector<float> out(tensor.data.size() / sizeof(float));
  std::memcpy(out.data(), tensor.data.data(), out.size() * sizeof(float));
  return out;
}

ImportanceMatrix read_gguf(const std::filesystem::path& path) {
  const auto gguf = GgufFile::open(path);
  ImportanceMatrix out;
  out.file = path.string();
  const std::string type = gguf->string("general.type").value_or("");
  if (type != "imatrix") fail("{}: general.type: found \"{}\", expected \"imatrix\"", out.file, printable(type));
  if (const auto* datasets = gguf->strings("imatrix.datasets")) out.datasets = *datasets;
  const auto number = [&](const char* key) {
    const auto value = gguf->integer(key);
    if (!value) fail("{}: {} is missing", out.file, key);
    if (*value < 0 || *value > INT32_MAX) fail("{}: {}: found {}, expected 0 to {}", out.file, key, *value, INT32_MAX);
    return static_cast<int>(*value);
  };
  out.chunk_count = number("imatrix.chunk_count");
  out.chunk_size = std::max(1, number("imatrix.chunk_size"));
  std::map<std::string, const TensorInfo*> counts;
  for (const TensorInfo& tensor : gguf->tensors())
    if (tensor.name.ends_with(kCounts)) counts[tensor.name.substr(0, tensor.name.size() - kCounts.size())] = &tensor;
  for (const TensorInfo& tensor : gguf->tensors()) {
    if (!tensor.name.ends_with(kSums)) continue;
    const std::string name = tensor.name.substr(0, tensor.name.size() - kSums.size());
    const auto found = counts.find(name);
    if (found == counts.end()) fail("{}: {} has no {}{}", out.file, printable(tensor.name), printable(name), kCounts);
    ImportanceMatrix::Entry entry{.sums = floats_of(tensor, out.file), .counts = {}};
    for (const float c : floats_of(*found->second, out.file)) {
      if (!(c >= 0.0f && c < 9e15f)) fail("{}: {}{}: found {}, expected a number of tokens", out.file, printable(name), kCounts, c);
      entry.counts.push_back(std::llround(c));
    }
    if (entry.sums.size() % entry.counts.size() != 0)
      fail("{}: {}: found {} sums for {} counts, expected a multiple", out.file, printable(name), entry.sums.size(), entry.counts.size());
    counts.erase(found);
    out.entries[name] = std::move(entry);
  }
  if (!counts.empty()) fail("{}: {}{} has no {}", out.file, printable(counts.begin()->first), kCounts, kSums);
  if (out.entries.empty()) fail("{}: found no tensor NAME{}, expected one for each weight", out.file, kSums);
  return out;
}

class DatReader {
 public:
  DatReader(std::span<const std::byte> bytes, std::string file) : bytes_(bytes), file_(std::move(file)) {}

  [[nodiscard]] bool at_end() const { return at_ == bytes_.size(); }
  int integer(std::string_view what, int smallest) {
    int32_t value = 0;
    std::memcpy(&value, take(sizeof value, what).data(), sizeof value);
    if (value < smallest) fail("{}: {}: found {}, expected at least {}", file_, what, value, smallest);
    return value;
  }
  std::string text(std::string_view what, int longest) {
    const int n = integer(what, 0);
    if (n > longest) fail("{}: {}: found {} bytes, expected at most {}", file_, what, n, longest);
    const auto bytes = take(static_cast<size_t>(n), what);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  std::vector<float> floats(int n, std::string_view what) {
    const auto bytes = take(static_cast<size_t>(n) * sizeof(float), what);
    std::vector<float> out(static_cast<size_t>(n));
    std::memcpy(out.data(), bytes.data(), bytes.size());
    return out;
  }

 private:
  std::span<const std::byte> take(size_t n, std::string_view what) {
    if (n > bytes_.size() - at_) fail("{}: {}: expected {} bytes, found {} to the end of the file", file_, what, n, bytes_.size() - at_);
    at_ += n;
    return bytes_.subspan(at_ - n, n);
  }

  std::span<const std::byte> bytes_;
  std::string file_;
  size_t at_ = 0;
};

ImportanceMatrix read_dat(std::span<const std::byte> bytes, const std::filesystem::path& path) {
  ImportanceMatrix out;
  out.file = path.string();
  DatReader reader(bytes, out.file);
  const int n = reader.integer("number of entries", 1);
  for (int i = 0; i < n; ++i) {
    const std::string name = reader.text(fmt::format("name of entry {}", i), 1024);
    if (name.empty()) fail("{}: name of entry {}: found none", out.file, i);
    const std::string shown(printable(name));
    ImportanceMatrix::Entry entry;
    entry.counts = {reader.integer(fmt::format("{}: windows", shown), 0)};
    const int numbers = reader.integer(fmt::format("{}: numbers", shown), 1);
    entry.sums = reader.floats(numbers, shown);
    // Without windows the numbers are the means themselves.
    if (entry.counts[0] == 0) entry.counts[0] = 1;
    if (!out.entries.emplace(name, std::move(entry)).second) fail("{}: {} appears twice", out.file, shown);
  }
  if (!reader.at_end()) {
    out.chunk_count = reader.integer("windows", 0);
    if (!reader.at_end()) out.datasets.push_back(reader.text("name of the text", 1 << 20));
  }
  return out;
}

}  // namespace

ImportanceMatrix ImportanceMatrix::read(const std::filesystem::path& path) {
  const auto mapped = MappedFile::open(path);
  const auto bytes = mapped->bytes();
  if (bytes.size() >= 4 && std::memcmp(bytes.data(), "GGUF", 4) == 0) return read_gguf(path);
  return read_dat(bytes, path);
}

namespace {

void write_gguf(const ImportanceMatrix& imatrix, const std::filesystem::path& path) {
  GgufWriter out(path);
  out.set_string("general.type", "imatrix");
  out.set_strings("imatrix.datasets", imatrix.datasets);
  out.set_u32("imatrix.chunk_count", static_cast<uint32_t>(imatrix.chunk_count));
  out.set_u32("imatrix.chunk_size", static_cast<uint32_t>(imatrix.chunk_size));
  for (const auto& [name, entry] : imatrix.entries) {
    const auto rows = static_cast<int64_t>(entry.counts.size());
    out.declare(name + std::string(kSums), Format::f32, {rows, static_cast<int64_t>(entry.sums.size()) / rows});
    out.declare(name + std::string(kCounts), Format::f32, {rows, 1});
  }
  for (const auto& [name, entry] : imatrix.entries) {
    const std::vector<float> counts(entry.counts.begin(), entry.counts.end());
    out.write(std::as_bytes(std::span(entry.sums)));
    out.write(std::as_bytes(std::span(counts)));
  }
  out.commit();
}

void write_dat(const ImportanceMatrix& imatrix, const std::filesystem::path& path) {
  AtomicFile out(path);
  const auto integer = [&](int64_t value) {
    if (value < 0 || value > INT32_MAX) fail("{}: {} does not fit the .dat format; write .gguf", path.string(), value);
    const auto stored = static_cast<int32_t>(value);
    out.write(std::as_bytes(std::span(&stored, 1)));
  };
  const auto text = [&](const std::string& value) {
    integer(static_cast<int64_t>(value.size()));
    out.write(value);
  };
  const auto seen = [](const ImportanceMatrix::Entry& e) { return *std::max_element(e.counts.begin(), e.counts.end()); };
  integer(std::count_if(imatrix.entries.begin(), imatrix.entries.end(), [&](const auto& entry) { return seen(entry.second) > 0; }));
  for (const auto& [name, entry] : imatrix.entries) {
    if (seen(entry) == 0) continue;
    text(name);
    const int64_t size = std::max(1, imatrix.chunk_size), windows = (seen(entry) + size - 1) / size;
    integer(windows);
    integer(static_cast<int64_t>(entry.sums.size()));
    const size_t width = entry.sums.size() / entry.counts.size();
    std::vector<float> numbers(entry.sums.size());
    for (size_t i = 0; i < numbers.size(); ++i) {
      const int64_t count = entry.counts[i / width];
      numbers[i] = (count > 0 ? entry.sums[i] / static_cast<float>(count) : 1.0f) * static_cast<float>(windows);
    }
    out.write(std::as_bytes(std::span(numbers)));
  }
  integer(imatrix.chunk_count);
  text(imatrix.datasets.empty() ? "" : imatrix.datasets.back());
  out.commit();
}

}  // namespace

void ImportanceMatrix::write(const std::filesystem::path& path, ImatrixFormat format) const {
  if (entries.empty()) fail("{}: no tensor was seen, so there is nothing to write", path.string());
  format == ImatrixFormat::gguf ? write_gguf(*this, path) : write_dat(*this, path);
}

}  // namespace cachalot
