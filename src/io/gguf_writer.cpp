// GgufWriter.
#include "io/gguf_writer.h"

#include <algorithm>
#include <bit>

#include "base/check.h"
#include "base/error.h"
#include "io/duplicates.h"
#include "io/gguf_reader.h"

namespace cachalot {
namespace {

constexpr size_t kMaxTensorName = 63;
constexpr size_t kSampleBytes = 4096;

uint64_t padded(uint64_t n, uint64_t alignment) { return (n + alignment - 1) / alignment * alignment; }

}  // namespace

GgufWriter::GgufWriter(const std::filesystem::path& path, AtomicFile::Kind kind) : file_(path, kind) {}

void GgufWriter::set(std::string_view key, GgufValue value) {
  CACHALOT_CHECK(!has_header_, "{} set after the first tensor", key);
  if (key == "general.alignment") {
    const int64_t* alignment = std::get_if<int64_t>(&value.value);
    CACHALOT_CHECK(value.type == GgufType::u32 && alignment != nullptr && *alignment >= 8 &&
                   std::has_single_bit(static_cast<uint64_t>(*alignment)));
    alignment_ = static_cast<uint64_t>(*alignment);
  }
  const auto found = std::find_if(metadata_.begin(), metadata_.end(), [&](const auto& entry) { return entry.first == key; });
  if (found != metadata_.end())
    found->second = std::move(value);
  else
    metadata_.emplace_back(std::string(key), std::move(value));
}

void GgufWriter::set_string(std::string_view key, std::string value) { set(key, {GgufType::string, std::move(value)}); }
void GgufWriter::set_u32(std::string_view key, uint32_t value) { set(key, {GgufType::u32, int64_t{value}}); }
void GgufWriter::set_f32(std::string_view key, float value) { set(key, {GgufType::f32, double{value}}); }
void GgufWriter::set_bool(std::string_view key, bool value) { set(key, {GgufType::boolean, value}); }
void GgufWriter::set_strings(std::string_view key, std::vector<std::string> values) {
  set(key, {GgufType::array, GgufArray{GgufType::string, std::move(values)}});
}
void GgufWriter::set_i32s(std::string_view key, std::vector<int64_t> values) {
  set(key, {GgufType::array, GgufArray{GgufType::i32, std::move(values)}});
}
void GgufWriter::set_f32s(std::string_view key, std::vector<double> values) {
  set(key, {GgufType::array, GgufArray{GgufType::f32, std::move(values)}});
}

void GgufWriter::declare(std::string name, Format format, std::vector<int64_t> shape) {
  CACHALOT_CHECK(!has_header_, "{} declared after the first tensor was written", name);
  const FormatInfo& block = info(format);
  CACHALOT_CHECK(block.gguf_type >= 0, "{}: GGUF has no type for {}", name, block.name);
  if (name.empty() || name.size() > kMaxTensorName)
    fail("{}: tensor \"{}\": a name of {} bytes, expected 1 to {}", file_.name(), printable(name), name.size(), kMaxTensorName);
  if (shape.empty() || shape.size() > 4 || *std::min_element(shape.begin(), shape.end()) < 1)
    fail("{}: tensor \"{}\": shape: found [{}], expected 1 to 4 dimensions of at least 1", file_.name(), name, fmt::join(shape, ", "));
  if (shape.back() % block.block_elems != 0)
    fail("{}: tensor \"{}\": rows of {} elements, expected a multiple of {} for {}", file_.name(), name, shape.back(), block.block_elems,
         block.name);
  uint64_t bytes = row_bytes(format, shape.back());
  for (size_t d = 0; d + 1 < shape.size(); ++d) bytes *= static_cast<uint64_t>(shape[d]);
  tensors_.push_back({std::move(name), format, std::move(shape), bytes});
}

template <typename T>
void GgufWriter::write_number(T value) {
  file_.write(std::as_bytes(std::span(&value, 1)));
}

void GgufWriter::write_text(std::string_view text) {
  write_number(static_cast<uint64_t>(text.size()));
  file_.write(text);
}

void GgufWriter::write_integer(GgufType type, int64_t value) {
  // Little-endian two's complement: the low bytes are the narrower number.
  file_.write(std::as_bytes(std::span(&value, 1)).first(gguf_scalar_bytes(type)));
}

void GgufWriter::write_real(GgufType type, double value) {
  if (type == GgufType::f32)
    write_number(static_cast<float>(value));
  else
    write_number(value);
}

void GgufWriter::write_array(const GgufArray& array) {
  write_number(static_cast<int32_t>(array.element));
  std::visit([this](const auto& values) { write_number(static_cast<uint64_t>(values.size())); }, array.values);
  if (const auto* integers = std::get_if<std::vector<int64_t>>(&array.values)) {
    for (const int64_t value : *integers) write_integer(array.element, value);
  } else if (const auto* numbers = std::get_if<std::vector<double>>(&array.values)) {
    for (const double value : *numbers) write_real(array.element, value);
  } else {
    for (const std::string& text : std::get<std::vector<std::string>>(array.values)) write_text(text);
  }
}

void GgufWriter::write_value(const GgufValue& value) {
  if (const auto* integer = std::get_if<int64_t>(&value.value)) return write_integer(value.type, *integer);
  if (const auto* number = std::get_if<double>(&value.value)) return write_real(value.type, *number);
  if (const auto* boolean = std::get_if<bool>(&value.value)) return write_integer(value.type, *boolean ? 1 : 0);
  if (const auto* text = std::get_if<std::string>(&value.value)) return write_text(*text);
  write_array(std::get<GgufArray>(value.value));
}

void GgufWriter::write_header() {
  has_header_ = true;
  const auto twice = first_duplicate(tensors_.size(), [this](size_t i) { return std::string_view(tensors_[i].name); });
  if (twice) fail("{}: tensor \"{}\" appears twice", file_.name(), *twice);
  file_.write("GGUF");
  write_number(uint32_t{3});
  write_number(static_cast<uint64_t>(tensors_.size()));
  write_number(static_cast<uint64_t>(metadata_.size()));
  for (const auto& [key, value] : metadata_) {
    write_text(key);
    write_number(static_cast<int32_t>(value.type));
    write_value(value);
  }
  uint64_t offset = 0;
  for (const Declared& tensor : tensors_) {
    write_text(tensor.name);
    write_number(static_cast<uint32_t>(tensor.shape.size()));
    for (auto dim = tensor.shape.rbegin(); dim != tensor.shape.rend(); ++dim) write_number(*dim);
    write_number(static_cast<int32_t>(info(tensor.format).gguf_type));
    write_number(offset);
    offset += padded(tensor.bytes, alignment_);
  }
  file_.pad_to(alignment_);
}

void GgufWriter::begin(size_t n_written) {
  CACHALOT_CHECK(!has_header_ && n_written <= tensors_.size(), "{} of {} tensors", n_written, tensors_.size());
  write_header();
  uint64_t total = file_.position(), at = total;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const uint64_t bytes = padded(tensors_[i].bytes, alignment_);
    if (i < n_written) at += bytes;
    total += bytes;
  }
  file_.resize(total);
  file_.seek(at);
  current_ = first_ = n_written;
}

void GgufWriter::write(std::span<const std::byte> bytes) {
  if (!has_header_) write_header();
  if (bytes.empty()) return;
  CACHALOT_CHECK(current_ < tensors_.size(), "{} bytes after the last tensor", bytes.size());
  const Declared& tensor = tensors_[current_];
  CACHALOT_CHECK(bytes.size() <= tensor.bytes - written_of_it_, "{}: {} bytes, {} are left", tensor.name, bytes.size(),
                 tensor.bytes - written_of_it_);
  if (written_of_it_ == 0) {
    const auto sample = bytes.first(std::min(bytes.size(), kSampleBytes));
    samples_.push_back({file_.position(), {sample.begin(), sample.end()}});
  }
  file_.write(bytes);
  written_of_it_ += bytes.size();
  if (written_of_it_ < tensor.bytes) return;
  file_.pad_to(alignment_);
  written_of_it_ = 0;
  ++current_;
}

void GgufWriter::check_samples() {
  std::vector<std::byte> found;
  for (size_t i = 0; i < samples_.size(); ++i) {
    found.resize(samples_[i].bytes.size());
    file_.read_back(samples_[i].at, found);
    if (found != samples_[i].bytes)
      fail("{}: tensor \"{}\": what was read back is not what was written", file_.name(), tensors_[first_ + i].name);
  }
}

void GgufWriter::commit() {
  if (!has_header_) write_header();
  CACHALOT_CHECK(current_ == tensors_.size(), "{} of {} tensors written", current_, tensors_.size());
  check_samples();
  file_.commit();
}

}  // namespace cachalot
