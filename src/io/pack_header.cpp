// The header of a pack as JSON: written, and read with every number checked.
#include <algorithm>
#include <charconv>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "base/error.h"
#include "base/hash.h"
#include "base/json.h"
#include "io/pack_file.h"
#include "io/pack_format.h"

namespace cachalot {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxLinears = 1u << 20, kMaxSegments = 16, kMaxMatrices = 1u << 16;

// ---- writing ----

std::string hex(std::span<const uint64_t> hashes) {
  std::string text;
  text.reserve(hashes.size() * 16);
  for (const uint64_t hash : hashes) fmt::format_to(std::back_inserter(text), "{:016x}", hash);
  return text;
}

Json json_of(const PackBlob& blob) { return {{"at", blob.at}, {"bytes", blob.bytes}, {"xxh3", hex(blob.hashes)}}; }

Json json_of(const std::vector<PackNote>& notes) {
  Json out = Json::array();
  for (const PackNote& note : notes)
    out.push_back({{"file", note.file}, {"bytes", note.bytes}, {"mtime_ns", note.mtime_ns}, {"xxh3", hex({&note.hash, 1})}});
  return out;
}

std::string text_of(const PackHeader& header) {
  Json linears = Json::array(), vectors = Json::array();
  for (const auto& [name, blob] : header.vectors) vectors.push_back({{"name", name}, {"data", json_of(blob)}});
  for (const PackLinear& linear : header.linears) {
    Json sources = Json::array(), buffers = Json::array();
    for (const PackSource& s : linear.sources)
      sources.push_back({{"name", s.name},
                         {"format", info(s.format).name},
                         {"matrices", s.n_matrices},
                         {"out", s.out},
                         {"in", s.in},
                         {"group", s.group}});
    for (const PackBlob& blob : linear.buffers) buffers.push_back(json_of(blob));
    linears.push_back({{"sources", std::move(sources)}, {"description", json_of(linear.description)}, {"buffers", std::move(buffers)}});
  }
  const Json root{{"layout", header.layout},       {"container", header.container},      {"rank", header.rank},
                  {"ranks", header.n_ranks},       {"sources", json_of(header.sources)}, {"companions", json_of(header.companions)},
                  {"vectors", std::move(vectors)}, {"linears", std::move(linears)}};
  return root.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// ---- reading ----

class HeaderReader {
 public:
  HeaderReader(std::string_view json, const std::string& file, uint64_t data_end)
      : document_(JsonDocument::parse(json, file + ": header", {.max_bytes = 256u << 20, .max_depth = 8, .unique_keys = true})),
        data_end_(data_end) {}

  PackHeader header() {
    const JsonValue& root = document_.root();
    PackHeader out;
    out.layout = std::string(root.at("layout").string());
    out.container = std::string(root.at("container").string());
    if (out.container != "gguf" && out.container != "safetensors")
      fail("{}: found \"{}\", expected gguf or safetensors", root.at("container").where(), printable(out.container));
    out.n_ranks = static_cast<int>(number(root, "ranks", 1, 4096));
    out.rank = static_cast<int>(number(root, "rank", 0, out.n_ranks - 1));
    out.sources = notes(root.at("sources"));
    out.companions = notes(root.at("companions"));
    for (const PackNote& note : out.companions)
      if (note.file.empty() || note.file.find('/') != std::string::npos || note.file.front() == '.')
        fail("{}: found \"{}\", expected the name of a file beside the pack", root.at("companions").where(), printable(note.file));
    for_each(root.at("vectors"), kMaxLinears, [&](const JsonValue& value) {
      PackBlob data = blob(value.at("data"));
      if (data.bytes == 0 || data.bytes % sizeof(float) != 0)
        fail("{}: found {} bytes, expected whole f32 numbers", value.where(), data.bytes);
      out.vectors.emplace_back(unique_name(value), std::move(data));
    });
    for_each(root.at("linears"), kMaxLinears, [&](const JsonValue& value) { out.linears.push_back(linear(value)); });
    return out;
  }

 private:
  template <typename F>
  static void for_each(const JsonValue& list, size_t most, const F& f) {
    size_t n = 0;
    for (const auto element : list.array()) {
      if (n == most) fail("{}: more than {} entries", list.where(), most);
      f(JsonValue(element, fmt::format("{}[{}]", list.where(), n++)));
    }
  }

  static uint64_t number(const JsonValue& object, const char* key, int64_t low, int64_t high) {
    const JsonValue value = object.at(key);
    const int64_t found = value.integer();
    if (found < low || found > high) fail("{}: found {}, expected {} to {}", value.where(), found, low, high);
    return static_cast<uint64_t>(found);
  }

  static std::vector<uint64_t> hashes(const JsonValue& object, uint64_t n) {
    const JsonValue value = object.at("xxh3");
    const std::string_view text = value.string();
    if (text.size() / 16 != n || text.size() % 16 != 0)
      fail("{}: found {} hexadecimal digits, expected 16 for each of {} chunks", value.where(), text.size(), n);
    std::vector<uint64_t> out;
    for (size_t at = 0; at < text.size(); at += 16) {
      uint64_t hash = 0;
      const auto [end, problem] = std::from_chars(text.data() + at, text.data() + at + 16, hash, 16);
      if (problem != std::errc() || end != text.data() + at + 16) fail("{}: expected hexadecimal digits", value.where());
      out.push_back(hash);
    }
    return out;
  }

  PackBlob blob(const JsonValue& value) const {
    PackBlob out;
    constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
    out.at = number(value, "at", static_cast<int64_t>(kPackEdge), kMost);
    out.bytes = number(value, "bytes", 0, kMost);
    if (out.at > data_end_ || out.bytes > data_end_ - out.at)
      fail("{}: {} bytes at {} reach past the data, which ends at {}", value.where(), out.bytes, out.at, data_end_);
    out.hashes = hashes(value, (out.bytes + kPackChunk - 1) / kPackChunk);
    return out;
  }

  static std::vector<PackNote> notes(const JsonValue& list) {
    std::vector<PackNote> out;
    for_each(list, 1u << 16, [&](const JsonValue& value) {
      out.push_back({.file = std::string(value.at("file").string()),
                     .bytes = number(value, "bytes", 0, std::numeric_limits<int64_t>::max()),
                     .hash = hashes(value, 1)[0],
                     .mtime_ns = value.at("mtime_ns").integer()});
    });
    return out;
  }

  std::string unique_name(const JsonValue& object) {
    const JsonValue value = object.at("name");
    std::string name(value.string());
    if (name.empty() || !names_.insert(name).second) fail("{}: the name \"{}\" is empty or there twice", value.where(), printable(name));
    return name;
  }

  PackLinear linear(const JsonValue& value) {
    PackLinear out;
    for_each(value.at("sources"), kMaxSegments, [&](const JsonValue& item) {
      PackSource s;
      s.name = unique_name(item);
      const auto format = format_of_name(item.at("format").string());
      if (!format) fail("{}: found \"{}\", which is no weight format", item.at("format").where(), printable(item.at("format").string()));
      s.format = *format;
      s.n_matrices = static_cast<int>(number(item, "matrices", 1, kMaxMatrices));
      s.out = static_cast<int>(number(item, "out", 1, 1 << 30));
      s.in = static_cast<int>(number(item, "in", 1, 1 << 30));
      s.group = static_cast<int>(number(item, "group", 0, 1 << 30));
      out.sources.push_back(std::move(s));
    });
    if (out.sources.empty()) fail("{}: found no sources, expected at least one", value.where());
    out.description = blob(value.at("description"));
    for_each(value.at("buffers"), kMaxSegments, [&](const JsonValue& item) { out.buffers.push_back(blob(item)); });
    return out;
  }

  JsonDocument document_;
  uint64_t data_end_;
  std::unordered_set<std::string> names_;
};

}  // namespace

PackHeader parse_pack_header(std::string_view json, const std::string& file, uint64_t data_end) {
  return HeaderReader(json, file, data_end).header();
}

void PackWriter::commit(const PackHeader& header) {
  PackTrailer last{};
  const std::string text = text_of(header);
  last.header_at = file_.position();
  last.header_bytes = text.size();
  last.header_hash = xxh3(std::as_bytes(std::span(text)));
  last.file_bytes = file_.position() + text.size() + sizeof last;
  std::memcpy(last.magic, kPackEndMagic.data(), kPackEndMagic.size());
  file_.write(text);
  file_.write(std::as_bytes(std::span(&last, 1)));
  file_.commit();
}

}  // namespace cachalot
