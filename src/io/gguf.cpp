// GgufFile: opening whole and split files, and the typed getters.
#include "io/gguf.h"

#include <optional>

#include "base/error.h"
#include "io/duplicates.h"
#include "io/gguf_reader.h"

namespace cachalot {
namespace fs = std::filesystem;
namespace {

std::string part_name(std::string_view stem, int64_t number, int64_t count) {
  return fmt::format("{}-{:05}-of-{:05}.gguf", stem, number + 1, count);
}

// The stem of "<stem>-00001-of-00003.gguf" when `file` is that part; file names count from 1, split.no from 0.
std::optional<std::string> split_stem(const std::string& file, int64_t number, int64_t count) {
  const std::string ending = part_name("", number, count);
  if (!file.ends_with(ending)) return std::nullopt;
  return file.substr(0, file.size() - ending.size());
}

// What the first part says; all others must agree.
struct FirstPart {
  GgufReader::Split split;
  std::string architecture;
};
void check_part(const GgufReader& part, const std::string& file, const FirstPart& first, int64_t expected_number) {
  const auto expect = [&](std::string_view key, int64_t found, int64_t expected) {
    if (found != expected) fail("{}: {}: found {}, expected {} (a part of another model?)", file, key, found, expected);
  };
  expect("split.count", part.split().count, first.split.count);
  expect("split.no", part.split().number, expected_number);
  expect("split.tensors.count", part.split().n_tensors, first.split.n_tensors);
  if (const std::string found = part.architecture(); !found.empty() && found != first.architecture)
    fail("{}: general.architecture: found \"{}\", expected \"{}\" as in the first part", file, printable(found),
         printable(first.architecture));
}

}  // namespace

std::shared_ptr<const GgufFile> GgufFile::from_bytes(std::span<const std::byte> bytes, std::string name) {
  auto file = std::make_shared<GgufFile>();
  file->name_ = std::move(name);
  const GgufReader reader(bytes, file->name_);
  reader.append_whole(*file);
  return file;
}

std::shared_ptr<const GgufFile> GgufFile::open(const fs::path& path) {
  const auto given = MappedFile::open(path);
  const GgufReader given_reader(given->bytes(), given->path());
  const auto [number, count, n_tensors] = given_reader.split();
  if (count == 1) {
    auto file = std::make_shared<GgufFile>();
    file->name_ = path.string();
    file->parts_.push_back(given);
    given_reader.append_whole(*file);
    return file;
  }
  const auto stem = split_stem(path.filename().string(), number, count);
  if (!stem)
    fail("{}: split.count: found part {} of {}, expected a name that ends in \"{}\" (parts joined into one file cannot be read)",
         path.string(), number + 1, count, part_name("", number, count));

  auto file = std::make_shared<GgufFile>();
  file->name_ = path.string();
  FirstPart first;
  for (int64_t i = 0; i < count; ++i) {
    const fs::path part_path = path.parent_path() / part_name(*stem, i, count);
    if (std::error_code ignored; !fs::exists(part_path, ignored))
      fail("{}: part {} of {} is missing: expected {}", path.string(), i + 1, count, part_path.string());
    file->parts_.push_back(i == number ? given : MappedFile::open(part_path));
    const MappedFile& part = *file->parts_.back();
    const GgufReader reader(part.bytes(), part.path());
    if (i == 0) {
      first = {reader.split(), reader.architecture()};
      reader.append_metadata(*file);
    }
    check_part(reader, part.path(), first, i);
    reader.append_tensors(*file);
  }
  if (static_cast<int64_t>(file->tensors_.size()) != n_tensors)
    fail("{}: split.tensors.count: found {}, but the {} parts hold {} tensors", path.string(), n_tensors, count, file->tensors_.size());
  const auto twice = first_duplicate(file->tensors_.size(), [&](size_t i) { return std::string_view(file->tensors_[i].name); });
  if (twice) fail("{}: tensor \"{}\" is in two parts", path.string(), printable(*twice));
  return file;
}

const GgufValue* GgufFile::find(std::string_view key) const {
  for (const auto& [name, value] : metadata_) {
    if (name == key) return &value;
  }
  return nullptr;
}

namespace {

std::string describe(const GgufValue& value) {
  if (value.type != GgufType::array) return std::string(gguf_value_type_name(value.type));
  return fmt::format("an array of {}", gguf_value_type_name(std::get<GgufArray>(value.value).element));
}

template <typename T>
const T* scalar(const GgufFile& file, std::string_view key, const char* expected) {
  const GgufValue* value = file.find(key);
  if (value == nullptr) return nullptr;
  const T* out = std::get_if<T>(&value->value);
  if (out == nullptr) fail("{}: {}: found {}, expected {}", file.name(), key, describe(*value), expected);
  return out;
}

template <typename T>
const std::vector<T>* elements(const GgufFile& file, std::string_view key, const char* expected) {
  const GgufValue* value = file.find(key);
  if (value == nullptr) return nullptr;
  const GgufArray* array = std::get_if<GgufArray>(&value->value);
  const std::vector<T>* out = array == nullptr ? nullptr : std::get_if<std::vector<T>>(&array->values);
  if (out == nullptr || array->element == GgufType::boolean)
    fail("{}: {}: found {}, expected {}", file.name(), key, describe(*value), expected);
  return out;
}

template <typename T>
std::optional<T> copy(const T* value) {
  return value == nullptr ? std::nullopt : std::optional<T>(*value);
}

}  // namespace

std::optional<int64_t> GgufFile::integer(std::string_view key) const { return copy(scalar<int64_t>(*this, key, "an integer")); }
std::optional<double> GgufFile::number(std::string_view key) const {
  const GgufValue* value = find(key);
  if (value != nullptr && std::holds_alternative<int64_t>(value->value)) return static_cast<double>(std::get<int64_t>(value->value));
  return copy(scalar<double>(*this, key, "a number"));
}
std::optional<bool> GgufFile::boolean(std::string_view key) const { return copy(scalar<bool>(*this, key, "a bool")); }
std::optional<std::string> GgufFile::string(std::string_view key) const { return copy(scalar<std::string>(*this, key, "a string")); }
const std::vector<std::string>* GgufFile::strings(std::string_view key) const {
  return elements<std::string>(*this, key, "an array of strings");
}
const std::vector<int64_t>* GgufFile::integers(std::string_view key) const { return elements<int64_t>(*this, key, "an array of integers"); }
const std::vector<double>* GgufFile::numbers(std::string_view key) const { return elements<double>(*this, key, "an array of numbers"); }

}  // namespace cachalot
