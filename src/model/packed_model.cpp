// Packs what Decoder::load asks for, and reads it back.
#include "model/packed_model.h"

#include <algorithm>

#include "base/error.h"
#include "base/hash.h"
#include "io/gguf_writer.h"
#include "io/packed_checkpoint.h"
#include "model/decoder.h"

namespace cachalot {
namespace fs = std::filesystem;
namespace {

// What would make the directory two models at once.
void check_directory(const fs::path& directory, bool replace) {
  std::error_code error;
  if (!fs::exists(directory, error)) return;
  if (!fs::is_directory(directory, error)) fail("{}: not a directory", directory.string());
  if (fs::exists(directory / kPackName, error) && !replace)
    fail("{}: is there already; --force replaces it", (directory / kPackName).string());
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    const fs::path& path = entry.path();
    if (path.extension() == ".safetensors" || (path.extension() == ".gguf" && path.filename() != kPackGguf))
      fail("{}: holds a model ({}); packed files need a directory of their own", directory.string(), path.filename().string());
  }
}

// The files that configuration and tokenizer are read from.
std::vector<PackNote> write_companions(const Checkpoint& source, const fs::path& directory) {
  std::vector<PackNote> notes;
  const auto note = [&](const char* name) {
    const fs::path path = directory / name;
    notes.push_back({.file = name, .bytes = fs::file_size(path), .hash = hash_of_file(path), .mtime_ns = 0});
  };
  if (const GgufFile* gguf = source.gguf()) {
    GgufWriter writer(directory / kPackGguf);
    for (const auto& [key, value] : gguf->metadata())
      if (!key.starts_with("split.")) writer.set(key, value);
    writer.commit();
    note(kPackGguf);
    return notes;
  }
  const std::pair<const char*, std::string> files[] = {{"config.json", source.config_json()},
                                                       {"generation_config.json", source.generation_config_json()},
                                                       {"tokenizer.json", source.tokenizer_json()},
                                                       {"tokenizer_config.json", source.tokenizer_config_json()},
                                                       {"chat_template.jinja", source.chat_template_file()}};
  for (const auto& [name, text] : files) {
    if (text.empty()) continue;
    write_atomically(directory / name, text);
    note(name);
  }
  return notes;
}

std::vector<PackSource> sources_of(std::span<const LinearSource> segments) {
  std::vector<PackSource> out;
  for (const LinearSource& s : segments)
    out.push_back({.name = s.name, .format = s.format, .n_matrices = s.n_matrices(), .out = s.out, .in = s.in, .group = s.group});
  return out;
}

}  // namespace

PackModelResult write_packed_model(const Checkpoint& source, Ops& ops, const fs::path& directory, const PackModelOptions& options) {
  PackHeader header;
  header.layout = ops.packed_layout();
  if (header.layout.empty()) fail("{}: weights of this device cannot be written to packed files; expected --device cpu", ops.name());
  header.container = source.gguf() != nullptr ? "gguf" : "safetensors";
  check_directory(directory, options.replace);
  const RecordingCheckpoint recording(source);
  const Config config = read_config(recording);
  fs::create_directories(directory);
  // A pack that is replaced is gone from here on: its companions are about to change.
  fs::remove(directory / kPackName);
  header.sources = source_notes(source);
  header.companions = write_companions(source, directory);

  PackModelResult result{.file = directory / kPackName};
  PackWriter writer(result.file);
  LoadOptions load{.max_positions = 1, .mtp = true, .progress = options.progress};
  load.pack = [&](std::span<const LinearSource> segments) {
    const Linear w = ops.pack(segments);
    const PackedImage image = ops.packed_image(w);
    PackLinear& entry = header.linears.emplace_back(PackLinear{sources_of(segments), writer.write(image.description), {}});
    for (const auto& buffer : image.buffers) entry.buffers.push_back(writer.write(buffer));
    return Linear{w.out, w.in, w.n_matrices, 0, nullptr};  // its memory goes here
  };
  static_cast<void>(Decoder::load(recording, config, ops, load));
  for (const auto& [name, values] : recording.vectors())
    header.vectors.emplace_back(name, writer.write(std::as_bytes(std::span<const float>(values))));
  result.n_linears = static_cast<int>(header.linears.size());
  writer.commit(header);
  result.bytes = fs::file_size(result.file);
  return result;
}

Linear pack_linear(const Checkpoint& checkpoint, Ops& ops, std::span<const LinearSource> row_segments) {
  const PackFile* const pack = checkpoint.packed();
  if (pack == nullptr) return ops.pack(row_segments);
  const std::string layout = ops.packed_layout(), &name = row_segments[0].name;
  if (layout.empty())
    fail("{}: packed for \"{}\", which {} cannot read; run the original model", pack->name(), pack->header().layout, ops.name());
  if (layout != pack->header().layout)
    fail("{}: packed for \"{}\", expected \"{}\" on this machine; pack the model here", pack->name(), printable(pack->header().layout),
         layout);
  const PackLinear* const entry = pack->find(name);
  const auto same = [](const PackSource& packed, const LinearSource& wanted) { return packed.name == wanted.name; };
  if (entry == nullptr || !std::equal(entry->sources.begin(), entry->sources.end(), row_segments.begin(), row_segments.end(), same))
    fail("{}: \"{}\" is not packed as this version reads it; pack the model again", pack->name(), printable(name));
  std::vector<std::byte> description(entry->description.bytes);
  pack->read(entry->description, description, name);
  std::vector<size_t> sizes;
  for (const PackBlob& buffer : entry->buffers) sizes.push_back(buffer.bytes);
  int out = 0;
  for (const LinearSource& s : row_segments) out += s.out;
  try {
    Linear w =
        ops.from_image(description, sizes, [&](size_t i, std::span<std::byte> memory) { pack->read(entry->buffers[i], memory, name); });
    if (w.out != out || w.in != row_segments[0].in || w.n_matrices != row_segments[0].n_matrices())
      fail("found [{}, {}, {}], expected [{}, {}, {}]", w.n_matrices, w.out, w.in, row_segments[0].n_matrices(), out, row_segments[0].in);
    return w;
  } catch (const Error& error) {
    const std::string text = error.what();
    if (text.starts_with(pack->name())) throw;
    fail("{}: \"{}\": {}", pack->name(), printable(name), text);
  }
}

}  // namespace cachalot
