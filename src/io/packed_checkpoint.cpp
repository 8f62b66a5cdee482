// Opening a pack: its own checks, those of what lies beside it, and of the original if that is there.
#include "io/packed_checkpoint.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>

#include "base/error.h"
#include "io/checkpoint_impl.h"
#include "io/gguf.h"

namespace cachalot {
namespace fs = std::filesystem;
namespace {

constexpr size_t kMaxCompanion = 64u << 20;

struct FileState {
  uint64_t bytes = 0;
  int64_t mtime_ns = 0;
};
std::optional<FileState> state_of(const fs::path& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return {};
  return FileState{static_cast<uint64_t>(status.st_size), status.st_mtim.tv_sec * 1'000'000'000 + status.st_mtim.tv_nsec};
}

// A file that only was touched is read again to see that it holds the same; one that is gone does not matter.
void check_source(const PackNote& note, const std::string& pack) {
  const auto now = state_of(note.file);
  if (!now || (now->bytes == note.bytes && now->mtime_ns == note.mtime_ns)) return;
  if (now->bytes == note.bytes && hash_of_file(note.file) == note.hash) return;
  fail("{}: stale: {}, from which it was packed, has changed since; pack the model again", pack, printable(note.file, 400));
}

class PackedCheckpoint final : public Checkpoint {
 public:
  PackedCheckpoint(const fs::path& directory, std::string name) : directory_(directory), name_(std::move(name)) {
    pack_ = PackFile::open(directory / kPackName);
    const PackHeader& header = pack_->header();
    if (header.n_ranks != 1 || header.rank != 0) fail("{}: rank {} of {}, expected 0 of 1", pack_->name(), header.rank, header.n_ranks);
    for (const PackNote& note : header.sources) check_source(note, pack_->name());
    for (const PackNote& note : header.companions) check_companion(note);
    if (header.container == "gguf") {
      if (!has_companion(kPackGguf)) fail("{}: header: companions: {} is missing", pack_->name(), kPackGguf);
      gguf_ = GgufFile::open(directory / kPackGguf);
    }
    for (const PackLinear& linear : header.linears) {
      for (const PackSource& s : linear.sources) {
        TensorInfo tensor{.name = s.name, .format = s.format, .shape = {s.out, s.in}, .data = {}, .file = pack_->name()};
        if (s.n_matrices > 1) tensor.shape.insert(tensor.shape.begin(), s.n_matrices);
        tensor.dtype = info(s.format).name;
        sources_.emplace(s.name, &s);
        tensors_.push_back(std::move(tensor));
      }
    }
    for (const auto& [vector, blob] : header.vectors) vectors_.emplace(vector, &blob);
  }

  [[nodiscard]] Container container() const override { return gguf_ ? Container::gguf : Container::safetensors; }
  [[nodiscard]] std::string name() const override { return name_; }
  [[nodiscard]] const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  [[nodiscard]] const PackFile* packed() const override { return pack_.get(); }
  [[nodiscard]] bool has(std::string_view canonical) const override { return sources_.contains(canonical) || vectors_.contains(canonical); }

  [[nodiscard]] LinearSource linear(std::string_view canonical, int n_matrices, int out, int in) const override {
    const auto found = sources_.find(canonical);
    if (found == sources_.end()) fail("{}: the tensor \"{}\" is missing", pack_->name(), canonical);
    const PackSource& s = *found->second;
    if (s.n_matrices != n_matrices || s.out != out || s.in != in)
      fail("{}: tensor \"{}\": shape: found [{}, {}, {}], expected [{}, {}, {}]", pack_->name(), canonical, s.n_matrices, s.out, s.in,
           n_matrices, out, in);
    LinearSource source{.name = s.name, .format = s.format, .out = out, .in = in, .group = s.group};
    source.matrices.resize(static_cast<size_t>(n_matrices));
    return source;
  }

  [[nodiscard]] std::vector<float> vector(std::string_view canonical, int n) const override {
    const auto found = vectors_.find(canonical);
    if (found == vectors_.end()) fail("{}: the tensor \"{}\" is missing", pack_->name(), canonical);
    std::vector<float> out(found->second->bytes / sizeof(float));
    if (out.size() != static_cast<size_t>(n))
      fail("{}: tensor \"{}\": shape: found [{}], expected [{}]", pack_->name(), canonical, out.size(), n);
    pack_->read(*found->second, std::as_writable_bytes(std::span(out)), canonical);
    return out;
  }

  [[nodiscard]] std::vector<std::string> unmapped() const override { return {}; }
  [[nodiscard]] const GgufFile* gguf() const override { return gguf_.get(); }
  [[nodiscard]] std::string config_json() const override { return companion("config.json"); }
  [[nodiscard]] std::string generation_config_json() const override { return companion("generation_config.json"); }
  [[nodiscard]] std::string tokenizer_json() const override { return companion("tokenizer.json"); }
  [[nodiscard]] std::string tokenizer_config_json() const override { return companion("tokenizer_config.json"); }
  [[nodiscard]] std::string chat_template_file() const override { return companion("chat_template.jinja"); }

 private:
  void check_companion(const PackNote& note) const {
    const fs::path path = directory_ / note.file;
    const auto now = state_of(path);
    if (!now) fail("{}: the file {} is missing beside it", pack_->name(), path.string());
    if (now->bytes != note.bytes || hash_of_file(path) != note.hash)
      fail("{}: {} has changed since it was written with the pack; pack the model again", pack_->name(), path.string());
  }
  [[nodiscard]] bool has_companion(std::string_view file) const {
    const auto& all = pack_->header().companions;
    return std::any_of(all.begin(), all.end(), [&](const PackNote& note) { return note.file == file; });
  }
  [[nodiscard]] std::string companion(const char* file) const {
    return has_companion(file) ? read_text_file(directory_ / file, kMaxCompanion) : std::string();
  }

  fs::path directory_;
  std::string name_;
  std::shared_ptr<const PackFile> pack_;
  std::shared_ptr<const GgufFile> gguf_;
  std::vector<TensorInfo> tensors_;
  StringMap<const PackSource*> sources_;
  StringMap<const PackBlob*> vectors_;
};

}  // namespace

std::unique_ptr<Checkpoint> open_packed_checkpoint(const fs::path& directory, std::string name) {
  return std::make_unique<PackedCheckpoint>(directory, std::move(name));
}

std::vector<PackNote> source_notes(const Checkpoint& checkpoint) {
  std::vector<PackNote> notes;
  std::set<std::string> seen;
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    if (!seen.insert(tensor.file).second) continue;
    const auto now = state_of(tensor.file);
    if (!now) fail("{}: {}", tensor.file, std::strerror(errno));
    notes.push_back({fs::absolute(tensor.file).string(), now->bytes, hash_of_file(tensor.file), now->mtime_ns});
  }
  return notes;
}

LinearSource RecordingCheckpoint::linear(std::string_view canonical, int n_matrices, int out, int in) const {
  LinearSource source = inner_.linear(canonical, n_matrices, out, in);
  source.name = canonical;
  return source;
}

std::vector<float> RecordingCheckpoint::vector(std::string_view canonical, int n) const {
  std::vector<float> values = inner_.vector(canonical, n);
  const auto known = std::find_if(vectors_.begin(), vectors_.end(), [&](const auto& v) { return v.first == canonical; });
  if (known == vectors_.end()) vectors_.emplace_back(canonical, values);
  return values;
}

}  // namespace cachalot
