// A text's token ids and a base model's log-probabilities about it, as llama-perplexity --kl-divergence-base writes them, so that other
// models can be compared with one that is not at hand.
//
// Little-endian: "_logits_"; i32 window, vocab, windows; i32 tokens [windows * window]; then for each window, for each position from
// window / 2 on but the last: f32 scale, f32 least, u16 codes [vocab, padded to an even number] with log p = scale * code + least. The
// codes span the logits from the largest down to 16 nats below it; what lies lower has code 0.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/atomic_file.h"

namespace cachalot {

class MappedFile;

// One position of the file.
struct StoredLogits {
  float scale = 0.0f, least = 0.0f;
  std::span<const uint16_t> codes;  // [vocab]
  [[nodiscard]] float log_p(size_t i) const { return scale * static_cast<float>(codes[i]) + least; }
};
// Codes of one row of logits, appended to `codes` with their header.
void append_stored_logits(std::span<const float> logits, std::vector<uint16_t>& codes);

class LogitFileWriter {
 public:
  // tokens [windows * window]. Throws Error naming the path when it cannot be created.
  LogitFileWriter(const std::filesystem::path& path, int window, int vocab, std::span<const int> tokens);
  // The next scored position.
  void add(std::span<const float> logits);
  // Ends the file; all positions of all windows must have been added.
  void commit();

 private:
  AtomicFile file_;
  int vocab_;
  int64_t rows_left_;
  std::vector<uint16_t> row_;
};

class LogitFile {
 public:
  // Throws Error naming the file, what was found and what was expected.
  explicit LogitFile(const std::filesystem::path& path);
  ~LogitFile();

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] int window() const { return window_; }
  [[nodiscard]] int vocab() const { return vocab_; }
  [[nodiscard]] int n_windows() const { return n_windows_; }
  [[nodiscard]] int rows_per_window() const { return window_ - 1 - window_ / 2; }
  [[nodiscard]] std::span<const int> tokens() const { return tokens_; }  // [n_windows * window]
  [[nodiscard]] StoredLogits row(int window, int i) const;               // position window / 2 + i

 private:
  std::string name_;
  std::shared_ptr<const MappedFile> file_;
  int window_ = 0, vocab_ = 0, n_windows_ = 0;
  std::vector<int> tokens_;
  size_t rows_at_ = 0;
};

}  // namespace cachalot
