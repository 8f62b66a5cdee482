// GgufReader: every length is compared with the bytes left before it is used, every product is checked, and nothing that grows with
// a number in the file is allocated before that number is known to fit.
#include "io/gguf_reader.h"

#include <simdjson.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/error.h"
#include "io/duplicates.h"

namespace cachalot {
namespace {

constexpr uint64_t kMaxKeys = 1u << 16, kMaxTensors = 1u << 20, kMaxAlignment = 1u << 20, kMinAlignment = 8;
constexpr uint64_t kMaxStrings = 1'500'000, kMaxStringBytes = 16u << 20, kMaxNumbers = 1u << 21;
constexpr size_t kMaxKeyName = 65'535, kMaxTensorName = 63;
constexpr size_t kMinKeyBytes = 8 + 1 + 4 + 1, kMinTensorBytes = 8 + 1 + 4 + 8 + 4 + 8;

constexpr std::array<std::string_view, 13> kTypeNames = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                                         "bool", "string", "array", "u64", "i64", "f64"};
constexpr std::array<size_t, 13> kTypeBytes = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

// Names are shown to people and written as JSON, so they must be UTF-8 without control characters.
bool is_printable(std::string_view text) {
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) return false;
  }
  return simdjson::validate_utf8(text.data(), text.size());
}

}  // namespace

std::string_view gguf_value_type_name(GgufType type) { return kTypeNames[static_cast<size_t>(type)]; }
size_t gguf_scalar_bytes(GgufType type) { return kTypeBytes[static_cast<size_t>(type)]; }

GgufReader::GgufReader(std::span<const std::byte> bytes, const std::string& file) : bytes_(bytes), file_(file) {
  read_header();
  read_keys(n_keys_);
  read_tensors(n_tensors_);
  check_known_keys();
  check_data();
}

template <typename T>
T GgufReader::take(std::string_view what) {
  if (bytes_.size() - at_ < sizeof(T))
    fail("{}: {}: needs {} bytes at byte {}, but {} are left", file_, what, sizeof(T), at_, bytes_.size() - at_);
  const T out = load<T>(at_);
  at_ += sizeof(T);
  return out;
}

template <typename T>
T GgufReader::load(size_t at) const {
  T out;
  std::memcpy(&out, bytes_.data() + at, sizeof out);
  return out;
}

std::string_view GgufReader::take_text(std::string_view what, size_t max_size) {
  const auto size = take<uint64_t>(what);
  if (size > bytes_.size() - at_) fail("{}: {}: a string of {} bytes, but {} are left", file_, what, size, bytes_.size() - at_);
  if (size > max_size) fail("{}: {}: a string of {} bytes, expected at most {}", file_, what, size, max_size);
  const std::string_view out(reinterpret_cast<const char*>(bytes_.data()) + at_, size);
  at_ += size;
  return out;
}

GgufType GgufReader::take_type(std::string_view what) {
  const auto type = take<int32_t>(what);
  if (type < 0 || type >= static_cast<int32_t>(kTypeNames.size())) fail("{}: {}: found value type {}, expected 0 to 12", file_, what, type);
  return static_cast<GgufType>(type);
}

void GgufReader::read_header() {
  if (bytes_.size() < 4 || std::memcmp(bytes_.data(), "GGUF", 4) != 0) {
    const std::string_view found(reinterpret_cast<const char*>(bytes_.data()), std::min<size_t>(bytes_.size(), 4));
    fail("{}: magic: found \"{}\", expected \"GGUF\"", file_, printable(found));
  }
  at_ = 4;
  const auto version = take<uint32_t>("version");
  if (version != 3) {
    const uint32_t swapped = __builtin_bswap32(version);
    if (swapped >= 1 && swapped <= 3)
      fail("{}: version: found {} in big-endian order, expected a little-endian file of version 3", file_, swapped);
    fail("{}: version: found {}, expected 3", file_, version);
  }
  n_tensors_ = take<uint64_t>("tensor count");
  n_keys_ = take<uint64_t>("key count");
  if (n_tensors_ > kMaxTensors) fail("{}: tensor count: found {}, expected at most {}", file_, n_tensors_, kMaxTensors);
  if (n_keys_ > kMaxKeys) fail("{}: key count: found {}, expected at most {}", file_, n_keys_, kMaxKeys);
  const uint64_t least = n_keys_ * kMinKeyBytes + n_tensors_ * kMinTensorBytes;
  if (least > bytes_.size() - at_)
    fail("{}: {} keys and {} tensors need at least {} bytes, but {} are left", file_, n_keys_, n_tensors_, least, bytes_.size() - at_);
}

void GgufReader::read_keys(uint64_t n) {
  keys_.reserve(n);
  for (uint64_t i = 0; i < n; ++i) {
    Key key;
    key.name = take_text(fmt::format("key {}", i), kMaxKeyName);
    if (key.name.empty() || !is_printable(key.name))
      fail("{}: key {}: found the name \"{}\", expected printable characters", file_, i, printable(key.name));
    key.type = take_type(printable(key.name));
    key.value_at = at_;
    skip_value(key);
    keys_.push_back(key);
  }
  const auto twice = first_duplicate(keys_.size(), [this](size_t i) { return keys_[i].name; });
  if (twice) fail("{}: the key \"{}\" appears twice", file_, printable(*twice));
}

void GgufReader::skip_value(const Key& key) {
  if (key.type == GgufType::array) return skip_array(key);
  if (key.type != GgufType::string) return skip_scalars(key, key.type, 1);
  n_string_bytes_ += take_text(printable(key.name), kMaxStringBytes).size();
  if (n_string_bytes_ > kMaxStringBytes)
    fail("{}: {}: the strings of the metadata pass {} bytes", file_, printable(key.name), kMaxStringBytes);
}

void GgufReader::skip_array(const Key& key) {
  const std::string name = printable(key.name);
  const GgufType element = take_type(name);
  const auto n = take<uint64_t>(name);
  const uint64_t left = bytes_.size() - at_;
  if (element == GgufType::array) fail("{}: {}: found an array of arrays, expected an array of scalars or strings", file_, name);
  const uint64_t least = element == GgufType::string ? 8 : gguf_scalar_bytes(element);
  if (n > left / least) fail("{}: {}: an array of {} x {}, but {} bytes are left", file_, name, n, gguf_value_type_name(element), left);
  if (element != GgufType::string) {
    if (n > kMaxNumbers - n_numbers_) fail("{}: {}: an array of {} numbers, expected at most {} in the file", file_, name, n, kMaxNumbers);
    n_numbers_ += n;
    return skip_scalars(key, element, n);
  }
  if (n > kMaxStrings - n_strings_) fail("{}: {}: an array of {} strings, expected at most {} in the file", file_, name, n, kMaxStrings);
  n_strings_ += n;
  for (uint64_t i = 0; i < n; ++i) n_string_bytes_ += take_text(name, kMaxStringBytes).size();
  if (n_string_bytes_ > kMaxStringBytes) fail("{}: {}: the strings of the metadata pass {} bytes", file_, name, kMaxStringBytes);
}

void GgufReader::skip_scalars(const Key& key, GgufType type, uint64_t n) {
  const size_t size = gguf_scalar_bytes(type);
  if (n > (bytes_.size() - at_) / size)
    fail("{}: {}: needs {} bytes, but {} are left", file_, printable(key.name), n * size, bytes_.size() - at_);
  for (uint64_t i = 0; i < n && (type == GgufType::boolean || type == GgufType::u64); ++i) {
    const uint64_t found = type == GgufType::u64 ? load<uint64_t>(at_ + i * size) : load<uint8_t>(at_ + i);
    if (type == GgufType::boolean && found > 1) fail("{}: {}: found {} for a bool, expected 0 or 1", file_, printable(key.name), found);
    if (type == GgufType::u64 && found > static_cast<uint64_t>(INT64_MAX))
      fail("{}: {}: found {}, expected at most 2^63-1", file_, printable(key.name), found);
  }
  at_ += n * size;
}

void GgufReader::read_tensors(uint64_t n) {
  tensors_.reserve(n);
  for (uint64_t i = 0; i < n; ++i) tensors_.push_back(read_tensor());
  const auto twice = first_duplicate(tensors_.size(), [this](size_t i) { return tensors_[i].name; });
  if (twice) fail("{}: tensor \"{}\" appears twice", file_, printable(*twice));
}

GgufReader::Tensor GgufReader::read_tensor() {
  Tensor tensor;
  tensor.name = take_text("a tensor's name", bytes_.size());
  const auto name = [&tensor] { return printable(tensor.name); };  // only for messages: there may be a million tensors
  if (tensor.name.empty() || tensor.name.size() > kMaxTensorName || !is_printable(tensor.name))
    fail("{}: tensor \"{}\": a name of {} bytes, expected 1 to {} printable ones", file_, name(), tensor.name.size(), kMaxTensorName);
  const auto n_dims = take<uint32_t>("a tensor's dimension count");
  if (n_dims < 1 || n_dims > 4) fail("{}: tensor \"{}\": found {} dimensions, expected 1 to 4", file_, name(), n_dims);
  tensor.n_dims = static_cast<int>(n_dims);
  if (const size_t rest = n_dims * 8 + 12; rest > bytes_.size() - at_)
    fail("{}: tensor \"{}\": its entry needs {} bytes, but {} are left", file_, name(), rest, bytes_.size() - at_);
  int64_t elements = 1;
  for (uint32_t d = 0; d < n_dims; ++d) {
    tensor.ne[d] = take<int64_t>("dimension");
    if (tensor.ne[d] < 1) fail("{}: tensor \"{}\": dimension {}: found {}, expected at least 1", file_, name(), d, tensor.ne[d]);
    if (__builtin_mul_overflow(elements, tensor.ne[d], &elements))
      fail("{}: tensor \"{}\": its dimensions overflow 63 bits", file_, name());
  }
  const auto type = take<int32_t>("type");
  const auto format = format_of_gguf_type(type);
  if (!format) fail("{}: tensor \"{}\": found type {} ({}), which is not supported", file_, name(), type, gguf_type_name(type));
  tensor.format = *format;
  const FormatInfo& block = info(*format);
  if (tensor.ne[0] % block.block_elems != 0)
    fail("{}: tensor \"{}\": rows of {} elements, expected a multiple of {} for {}", file_, name(), tensor.ne[0], block.block_elems,
         gguf_type_name(type));
  int64_t bytes = 0;
  if (__builtin_mul_overflow(elements / block.block_elems, static_cast<int64_t>(block.block_bytes), &bytes))
    fail("{}: tensor \"{}\": its size overflows 63 bits", file_, name());
  tensor.offset = take<uint64_t>("offset");
  return tensor;
}

uint64_t GgufReader::tensor_bytes(const Tensor& tensor) const {
  const FormatInfo& block = info(tensor.format);
  uint64_t blocks = static_cast<uint64_t>(tensor.ne[0] / block.block_elems);
  for (int d = 1; d < tensor.n_dims; ++d) blocks *= static_cast<uint64_t>(tensor.ne[static_cast<size_t>(d)]);
  return blocks * static_cast<uint64_t>(block.block_bytes);
}

// Keys whose type or value this reader or its users depend on.
void GgufReader::check_known_keys() {
  if (const Key* key = find("general.alignment")) {
    if (key->type != GgufType::u32) fail("{}: general.alignment: found type {}, expected u32", file_, gguf_value_type_name(key->type));
    alignment_ = load<uint32_t>(key->value_at);
    if (!std::has_single_bit(alignment_) || alignment_ < kMinAlignment || alignment_ > kMaxAlignment)
      fail("{}: general.alignment: found {}, expected a power of two from {} to {}", file_, alignment_, kMinAlignment, kMaxAlignment);
  }
  split_ = {integer_or("split.no", 0), integer_or("split.count", 1),
            integer_or("split.tensors.count", static_cast<int64_t>(tensors_.size()))};
  if (split_.count < 1 || split_.count > 65'535) fail("{}: split.count: found {}, expected 1 to 65535", file_, split_.count);
  if (split_.number < 0 || split_.number >= split_.count)
    fail("{}: split.no: found {}, expected 0 to {}", file_, split_.number, split_.count - 1);

  struct Known {
    std::string_view key;
    std::array<GgufType, 2> elements;
  };
  constexpr std::array<Known, 4> kArrays = {{{"tokenizer.ggml.tokens", {GgufType::string, GgufType::string}},
                                             {"tokenizer.ggml.merges", {GgufType::string, GgufType::string}},
                                             {"tokenizer.ggml.scores", {GgufType::f32, GgufType::f64}},
                                             {"tokenizer.ggml.token_type", {GgufType::i32, GgufType::u32}}}};
  uint64_t n_tokens = 0;
  for (const auto& [name, expected] : kArrays) {
    const Key* key = find(name);
    if (key == nullptr) continue;
    GgufType element = GgufType::u8;
    uint64_t n = 0;
    if (!array_head(*key, element, n))
      fail("{}: {}: found {}, expected an array of {}", file_, name, gguf_value_type_name(key->type), gguf_value_type_name(expected[0]));
    if (element != expected[0] && element != expected[1])
      fail("{}: {}: found an array of {}, expected an array of {}", file_, name, gguf_value_type_name(element),
           gguf_value_type_name(expected[0]));
    if (name == "tokenizer.ggml.tokens") n_tokens = n;
    if ((name == "tokenizer.ggml.scores" || name == "tokenizer.ggml.token_type") && n != n_tokens)
      fail("{}: {}: found {} elements, expected {} (one per token)", file_, name, n, n_tokens);
  }
}

// The data starts at the next multiple of the alignment; every tensor sits at the running sum of the padded sizes.
void GgufReader::check_data() {
  const uint64_t size = bytes_.size();
  const auto padded = [this](uint64_t n) { return (n + alignment_ - 1) & ~(alignment_ - 1); };
  data_at_ = padded(at_);
  uint64_t end = at_;  // of what has been described so far
  uint64_t offset = 0;
  for (const Tensor& tensor : tensors_) {
    const std::string name = printable(tensor.name);
    const uint64_t bytes = tensor_bytes(tensor);
    if (tensor.offset != offset) fail("{}: tensor \"{}\": offset: found {}, expected {}", file_, name, tensor.offset, offset);
    // No sum can wrap: what precedes fits in the file, and a tensor has less than 2^63 bytes.
    if (data_at_ + offset + bytes > size)
      fail("{}: tensor \"{}\": its data ends at byte {}, but the file has {} (is the download complete?)", file_, name,
           data_at_ + offset + bytes, size);
    end = data_at_ + offset + bytes;
    offset += padded(bytes);
  }
  if (size > padded(end)) fail("{}: {} bytes after the last tensor, expected none", file_, size - padded(end));
}

const GgufReader::Key* GgufReader::find(std::string_view name) const {
  for (const Key& key : keys_) {
    if (key.name == name) return &key;
  }
  return nullptr;
}

bool GgufReader::array_head(const Key& key, GgufType& element, uint64_t& n) const {
  if (key.type != GgufType::array) return false;
  element = static_cast<GgufType>(load<int32_t>(key.value_at));
  n = load<uint64_t>(key.value_at + 4);
  return true;
}

int64_t GgufReader::integer_or(std::string_view name, int64_t fallback) const {
  const Key* key = find(name);
  if (key == nullptr) return fallback;
  const GgufValue found = value(*key);
  const int64_t* integer = std::get_if<int64_t>(&found.value);
  if (integer == nullptr) fail("{}: {}: found type {}, expected an integer", file_, name, gguf_value_type_name(key->type));
  return *integer;
}

std::string GgufReader::architecture() const {
  const Key* key = find("general.architecture");
  return key != nullptr && key->type == GgufType::string ? load_string(key->value_at) : std::string();
}

int64_t GgufReader::load_integer(GgufType type, size_t at) const {
  switch (type) {
    case GgufType::u8:
    case GgufType::boolean: return load<uint8_t>(at);
    case GgufType::i8: return load<int8_t>(at);
    case GgufType::u16: return load<uint16_t>(at);
    case GgufType::i16: return load<int16_t>(at);
    case GgufType::u32: return load<uint32_t>(at);
    case GgufType::i32: return load<int32_t>(at);
    default: return load<int64_t>(at);  // u64 was checked to fit
  }
}

std::string GgufReader::load_string(size_t at) const { return {reinterpret_cast<const char*>(bytes_.data()) + at + 8, load<uint64_t>(at)}; }

GgufValue GgufReader::value(const Key& key) const {
  switch (key.type) {
    case GgufType::f32: return {key.type, static_cast<double>(load<float>(key.value_at))};
    case GgufType::f64: return {key.type, load<double>(key.value_at)};
    case GgufType::boolean: return {key.type, load<uint8_t>(key.value_at) != 0};
    case GgufType::string: return {key.type, load_string(key.value_at)};
    case GgufType::array: return {key.type, array_value(key.value_at)};
    default: return {key.type, load_integer(key.type, key.value_at)};
  }
}

GgufArray GgufReader::array_value(size_t at) const {
  GgufArray out;
  out.element = static_cast<GgufType>(load<int32_t>(at));
  const auto n = load<uint64_t>(at + 4);
  at += 12;
  if (out.element == GgufType::string) {
    std::vector<std::string> strings;
    strings.reserve(n);
    for (uint64_t i = 0; i < n; ++i) {
      strings.push_back(load_string(at));
      at += 8 + strings.back().size();
    }
    out.values = std::move(strings);
    return out;
  }
  const size_t size = gguf_scalar_bytes(out.element);
  if (out.element == GgufType::f32 || out.element == GgufType::f64) {
    std::vector<double> numbers(n);
    for (uint64_t i = 0; i < n; ++i, at += size)
      numbers[i] = out.element == GgufType::f32 ? static_cast<double>(load<float>(at)) : load<double>(at);
    out.values = std::move(numbers);
    return out;
  }
  std::vector<int64_t> integers(n);
  for (uint64_t i = 0; i < n; ++i, at += size) integers[i] = load_integer(out.element, at);
  out.values = std::move(integers);
  return out;
}

void GgufReader::append_whole(GgufFile& out) const {
  if (split_.count != 1) fail("{}: split.count: found {}, expected a whole file", file_, split_.count);
  if (split_.n_tensors != static_cast<int64_t>(tensors_.size()))
    fail("{}: split.tensors.count: found {}, expected {}", file_, split_.n_tensors, tensors_.size());
  append_metadata(out);
  append_tensors(out);
}

void GgufReader::append_metadata(GgufFile& out) const {
  out.metadata_.reserve(out.metadata_.size() + keys_.size());
  for (const Key& key : keys_) out.metadata_.emplace_back(std::string(key.name), value(key));
}

void GgufReader::append_tensors(GgufFile& out) const {
  out.tensors_.reserve(out.tensors_.size() + tensors_.size());
  for (const Tensor& tensor : tensors_) {
    TensorInfo entry{.name = std::string(tensor.name), .format = tensor.format, .file = file_};
    entry.shape.assign(tensor.ne.rend() - tensor.n_dims, tensor.ne.rend());
    entry.data = bytes_.subspan(data_at_ + tensor.offset, tensor_bytes(tensor));
    entry.dtype = gguf_type_name(info(tensor.format).gguf_type);
    out.tensors_.push_back(std::move(entry));
  }
}

}  // namespace cachalot
