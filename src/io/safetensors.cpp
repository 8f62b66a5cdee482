// SafetensorsFile: two walks over the header. The first keeps 32 bytes per tensor and checks everything; only when the whole file
// is sound does the second build the table.
#include "io/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/check.h"
#include "base/error.h"
#include "io/duplicates.h"
#include "io/json_scanner.h"

namespace cachalot {
namespace {

constexpr uint64_t kMaxHeader = 100'000'000;
constexpr size_t kMaxTensors = 1'000'000, kMaxName = 1024, kMaxDims = 16, kMaxMetadata = 16'384;

constexpr std::array<SafetensorsDtype, 22> kDtypes = {{
    {"F64", 64, {}},
    {"I64", 64, {}},
    {"U64", 64, {}},
    {"C64", 64, {}},
    {"F32", 32, Format::f32},
    {"I32", 32, {}},
    {"U32", 32, {}},
    {"F16", 16, Format::f16},
    {"BF16", 16, Format::bf16},
    {"I16", 16, {}},
    {"U16", 16, {}},
    {"F8_E4M3", 8, {}},
    {"F8_E5M2", 8, {}},
    {"F8_E8M0", 8, {}},
    {"F8_E4M3FNUZ", 8, {}},
    {"F8_E5M2FNUZ", 8, {}},
    {"I8", 8, {}},
    {"U8", 8, {}},
    {"BOOL", 8, {}},
    {"F6_E2M3", 6, {}},
    {"F6_E3M2", 6, {}},
    {"F4", 4, {}},
}};

// What the first walk keeps of a tensor. Positions count bytes of the header, offsets bytes of the data.
struct Entry {
  uint64_t begin = 0, end = 0;
  uint32_t name_at = 0, name_size = 0;
  uint32_t value_at = 0;  // of the entry's '{'
};

class HeaderReader {
 public:
  HeaderReader(std::string_view header, uint64_t data_size, const std::string& file)
      : header_(header), data_size_(data_size), file_(file), scanner_(header, file + ": header") {}

  void check() {
    if (header_.empty() || header_[0] != '{') fail("{}: header: found \"{}\", expected '{{'", file_, printable(header_.substr(0, 8)));
    bool has_metadata = false;
    scanner_.object([&](const JsonScanner::Text& key) {
      if (key.raw == "__metadata__") {
        if (std::exchange(has_metadata, true)) fail("{}: header: \"__metadata__\" appears twice", file_);
        return check_metadata();
      }
      check_entry(key);
    });
    scanner_.expect_end();
    const auto name_of = [this](size_t i) { return name(entries_[i]); };
    if (const auto twice = first_duplicate(entries_.size(), name_of)) fail("{}: tensor \"{}\" appears twice", file_, printable(*twice));
    check_coverage();
  }

  // The table, in the order of the data. Only after check().
  std::vector<TensorInfo> tensors(std::span<const std::byte> data) {
    std::vector<TensorInfo> out;
    out.reserve(entries_.size());
    for (const Entry& entry : entries_) {
      TensorInfo tensor{.name = std::string(name(entry)), .data = data.subspan(entry.begin, entry.end - entry.begin), .file = file_};
      const SafetensorsDtype* dtype = nullptr;
      scanner_.seek(entry.value_at);
      read_entry(tensor.name, dtype, tensor.shape);
      tensor.dtype = dtype->name;
      tensor.has_format = dtype->format.has_value();
      tensor.format = dtype->format.value_or(Format::f32);
      out.push_back(std::move(tensor));
    }
    return out;
  }

 private:
  [[nodiscard]] std::string_view name(const Entry& entry) const { return header_.substr(entry.name_at, entry.name_size); }

  // A map from string to string, or null, as some writers leave it.
  void check_metadata() {
    if (scanner_.peek() == 'n') return scanner_.skip_null();
    std::vector<std::string> keys;
    scanner_.object([&](const JsonScanner::Text& key) {
      if (key.raw.size() > kMaxName) fail("{}: __metadata__: a key of {} bytes, expected at most {}", file_, key.raw.size(), kMaxName);
      if (keys.size() >= kMaxMetadata) fail("{}: __metadata__: more than {} keys", file_, kMaxMetadata);
      keys.push_back(JsonScanner::unescape(key));
      scanner_.string("a value of __metadata__");
    });
    const auto twice = first_duplicate(keys.size(), [&](size_t i) { return std::string_view(keys[i]); });
    if (twice) fail("{}: __metadata__: the key \"{}\" appears twice", file_, printable(*twice));
  }

  void check_entry(const JsonScanner::Text& key) {
    if (key.raw.empty() || key.raw.size() > kMaxName)
      fail("{}: a tensor name of {} bytes, expected 1 to {}", file_, key.raw.size(), kMaxName);
    if (key.escaped) fail("{}: tensor \"{}\": the name has an escape, expected plain characters", file_, printable(key.raw));
    if (entries_.size() >= kMaxTensors) fail("{}: more than {} tensors", file_, kMaxTensors);
    scanner_.peek();  // to the first character of the value
    Entry entry;
    entry.name_at = static_cast<uint32_t>(key.raw.data() - header_.data());
    entry.name_size = static_cast<uint32_t>(key.raw.size());
    entry.value_at = static_cast<uint32_t>(scanner_.position());
    const SafetensorsDtype* dtype = nullptr;
    shape_.clear();
    const auto [begin, end] = read_entry(key.raw, dtype, shape_);
    entry.begin = begin;
    entry.end = end;
    check_size(key.raw, *dtype, entry);
    entries_.push_back(entry);
  }

  std::pair<uint64_t, uint64_t> read_entry(std::string_view tensor, const SafetensorsDtype*& dtype, std::vector<int64_t>& shape) {
    std::array<uint64_t, 2> offsets{};
    size_t n_offsets = 0;
    bool has_shape = false, has_offsets = false;
    const auto once = [&](bool& seen, std::string_view key) {
      if (std::exchange(seen, true)) fail("{}: tensor \"{}\": the key \"{}\" appears twice", file_, printable(tensor), key);
    };
    scanner_.object([&](const JsonScanner::Text& key) {
      if (key.raw == "dtype") {
        bool seen = dtype != nullptr;
        once(seen, key.raw);
        const std::string_view found = scanner_.string("a dtype").raw;
        dtype = find_safetensors_dtype(found);
        if (dtype == nullptr)
          fail("{}: tensor \"{}\": found dtype \"{}\", expected one of the format's types (F32, BF16, ...)", file_, printable(tensor),
               printable(found));
      } else if (key.raw == "shape") {
        once(has_shape, key.raw);
        scanner_.array([&] {
          if (shape.size() >= kMaxDims) fail("{}: tensor \"{}\": more than {} dimensions", file_, printable(tensor), kMaxDims);
          shape.push_back(static_cast<int64_t>(scanner_.whole_number("a dimension of a shape")));
        });
      } else if (key.raw == "data_offsets") {
        once(has_offsets, key.raw);
        scanner_.array([&] {
          const uint64_t offset = scanner_.whole_number("data_offsets");
          if (n_offsets < 2) offsets[n_offsets] = offset;
          ++n_offsets;
        });
      } else {
        fail("{}: tensor \"{}\": found the key \"{}\", expected dtype, shape and data_offsets", file_, printable(tensor),
             printable(key.raw));
      }
    });
    if (dtype == nullptr || !has_shape || !has_offsets)
      fail("{}: tensor \"{}\": the key \"{}\" is missing", file_, printable(tensor),
           dtype == nullptr ? "dtype" : (has_shape ? "data_offsets" : "shape"));
    if (n_offsets != 2) fail("{}: tensor \"{}\": data_offsets: found {} numbers, expected 2", file_, printable(tensor), n_offsets);
    return {offsets[0], offsets[1]};
  }

  void check_size(std::string_view tensor, const SafetensorsDtype& dtype, const Entry& entry) const {
    uint64_t bits = static_cast<uint64_t>(dtype.bits);
    for (const int64_t dim : shape_) {
      if (__builtin_mul_overflow(bits, static_cast<uint64_t>(dim), &bits))
        fail("{}: tensor \"{}\": shape [{}] of {} overflows 64 bits", file_, printable(tensor), fmt::join(shape_, ", "), dtype.name);
    }
    if (bits % 8 != 0) fail("{}: tensor \"{}\": {} bits of {}, expected whole bytes", file_, printable(tensor), bits, dtype.name);
    if (entry.begin > entry.end)
      fail("{}: tensor \"{}\": data_offsets [{}, {}] run backwards", file_, printable(tensor), entry.begin, entry.end);
    if (entry.end - entry.begin != bits / 8)
      fail("{}: tensor \"{}\": data_offsets span {} bytes, expected {} for shape [{}] of {}", file_, printable(tensor),
           entry.end - entry.begin, bits / 8, fmt::join(shape_, ", "), dtype.name);
    if (entry.end > data_size_)
      fail("{}: tensor \"{}\": its data ends at byte {} of the data, but the file has {} (is the download complete?)", file_,
           printable(tensor), entry.end, data_size_);
  }

  // Sorted by place, the tensors must form one run without gap or overlap that ends with the file.
  void check_coverage() {
    std::sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) {
      return a.begin != b.begin ? a.begin < b.begin : (a.end != b.end ? a.end < b.end : a.name_at < b.name_at);
    });
    uint64_t at = 0;
    for (const Entry& entry : entries_) {
      if (entry.begin != at)
        fail("{}: tensor \"{}\": data_offsets begin at {}, expected {} ({})", file_, printable(name(entry)), entry.begin, at,
             entry.begin < at ? "it overlaps the tensor before it" : "no tensor covers the bytes between");
      at = entry.end;
    }
    if (at != data_size_) fail("{}: {} bytes after the last tensor, expected none", file_, data_size_ - at);
  }

  std::string_view header_;
  uint64_t data_size_;
  const std::string& file_;
  JsonScanner scanner_;
  std::vector<Entry> entries_;
  std::vector<int64_t> shape_;
};

}  // namespace

const SafetensorsDtype* find_safetensors_dtype(std::string_view name) {
  const auto found = std::find_if(kDtypes.begin(), kDtypes.end(), [&](const auto& dtype) { return dtype.name == name; });
  return found == kDtypes.end() ? nullptr : &*found;
}

std::shared_ptr<const SafetensorsFile> SafetensorsFile::from_bytes(std::span<const std::byte> bytes, std::string name) {
  uint64_t header_size = 0;
  if (bytes.size() < sizeof header_size) fail("{}: {} bytes, expected at least 8 for the header's length", name, bytes.size());
  std::memcpy(&header_size, bytes.data(), sizeof header_size);
  if (header_size > kMaxHeader) fail("{}: header length: found {}, expected at most {}", name, header_size, kMaxHeader);
  if (header_size > bytes.size() - 8) fail("{}: header length: found {}, but only {} bytes follow", name, header_size, bytes.size() - 8);
  const std::string_view header(reinterpret_cast<const char*>(bytes.data()) + 8, header_size);
  const auto data = bytes.subspan(8 + header_size);

  auto file = std::make_shared<SafetensorsFile>();
  file->name_ = std::move(name);
  HeaderReader reader(header, data.size(), file->name_);
  reader.check();
  file->tensors_ = reader.tensors(data);
  return file;
}

std::shared_ptr<const SafetensorsFile> SafetensorsFile::open(const std::filesystem::path& path) {
  auto mapping = MappedFile::open(path);
  auto file = std::const_pointer_cast<SafetensorsFile>(from_bytes(mapping->bytes(), mapping->path()));
  file->mapping_ = std::move(mapping);
  return file;
}

const TensorInfo* SafetensorsFile::find(std::string_view tensor) const {
  const auto found = std::find_if(tensors_.begin(), tensors_.end(), [&](const TensorInfo& info) { return info.name == tensor; });
  return found == tensors_.end() ? nullptr : &*found;
}

}  // namespace cachalot
