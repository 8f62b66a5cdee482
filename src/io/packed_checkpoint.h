// A packed model as a Checkpoint, and the watch on a Checkpoint that finds out what a pack must hold.
//
// A pack is a directory: rank-0-of-1.cachalot, and beside it the files that configuration and tokenizer are read from (config.json and its
// companions, or the metadata of a GGUF file). It needs nothing of the original. Where that is still in its place, it must be unchanged.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "io/pack_file.h"

namespace cachalot {

inline constexpr const char* kPackName = "rank-0-of-1.cachalot";
inline constexpr const char* kPackGguf = "pack-metadata.gguf";

// Throws Error when the pack or a companion is damaged, or the original has changed since.
std::unique_ptr<Checkpoint> open_packed_checkpoint(const std::filesystem::path& directory, std::string name);

// Size, time of change and hash of the files whose tensors a checkpoint holds.
std::vector<PackNote> source_notes(const Checkpoint& checkpoint);

// Forwards to a checkpoint and remembers what was asked of it. Linears carry GGUF's names, whatever the file calls them.
class RecordingCheckpoint final : public Checkpoint {
 public:
  explicit RecordingCheckpoint(const Checkpoint& inner) : inner_(inner) {}

  [[nodiscard]] Container container() const override { return inner_.container(); }
  [[nodiscard]] std::string name() const override { return inner_.name(); }
  [[nodiscard]] const std::vector<TensorInfo>& tensors() const override { return inner_.tensors(); }
  [[nodiscard]] bool has(std::string_view canonical) const override { return inner_.has(canonical); }
  [[nodiscard]] LinearSource linear(std::string_view canonical, int n_matrices, int out, int in) const override;
  [[nodiscard]] std::vector<float> vector(std::string_view canonical, int n) const override;
  [[nodiscard]] std::vector<std::string> unmapped() const override { return inner_.unmapped(); }
  void forget(const LinearSource& source) const override { inner_.forget(source); }
  [[nodiscard]] const GgufFile* gguf() const override { return inner_.gguf(); }
  [[nodiscard]] std::string config_json() const override { return inner_.config_json(); }
  [[nodiscard]] std::string generation_config_json() const override { return inner_.generation_config_json(); }
  [[nodiscard]] std::string tokenizer_json() const override { return inner_.tokenizer_json(); }
  [[nodiscard]] std::string tokenizer_config_json() const override { return inner_.tokenizer_config_json(); }
  [[nodiscard]] std::string chat_template_file() const override { return inner_.chat_template_file(); }

  // Every vector that was read, once, in order.
  [[nodiscard]] const std::vector<std::pair<std::string, std::vector<float>>>& vectors() const { return vectors_; }

 private:
  const Checkpoint& inner_;
  mutable std::vector<std::pair<std::string, std::vector<float>>> vectors_;
};

}  // namespace cachalot
