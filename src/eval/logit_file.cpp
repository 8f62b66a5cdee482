// Rows of log-probabilities in 16 bits.
#include "eval/logit_file.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/error.h"
#include "base/mapped_file.h"

namespace cachalot {
namespace {

constexpr std::string_view kMagic = "_logits_";
constexpr size_t kHeader = 20, kRowHeader = 2 * sizeof(float) / sizeof(uint16_t);

size_t row_codes(int vocab) { return (static_cast<size_t>(vocab) + 1) / 2 * 2 + kRowHeader; }

}  // namespace

void append_stored_logits(std::span<const float> logits, std::vector<uint16_t>& codes) {
  const auto [low, high] = std::minmax_element(logits.begin(), logits.end());
  const float largest = *high, smallest = std::max(*low, largest - 16.0f);
  double sum = 0.0;
  for (const float l : logits) sum += static_cast<double>(std::exp(l - largest));
  const float header[] = {(largest - smallest) / 65535.0f, smallest - largest - static_cast<float>(std::log(sum))};
  const size_t at = codes.size();
  codes.resize(at + row_codes(static_cast<int>(logits.size())));
  std::memcpy(codes.data() + at, header, sizeof header);
  if (!(header[0] > 0.0f)) return;
  const float inverse = 1.0f / header[0];
  uint16_t* const to = codes.data() + at + kRowHeader;
  for (size_t i = 0; i < logits.size(); ++i)
    if (logits[i] > smallest) to[i] = static_cast<uint16_t>(std::min(std::nearbyint(inverse * (logits[i] - smallest)), 65535.0f));
}

LogitFileWriter::LogitFileWriter(const std::filesystem::path& path, int window, int vocab, std::span<const int> tokens)
    : file_(path), vocab_(vocab) {
  CACHALOT_CHECK(window >= 3 && !tokens.empty() && tokens.size() % static_cast<size_t>(window) == 0, "{} tokens in windows of {}",
                 tokens.size(), window);
  const auto n = static_cast<int32_t>(tokens.size()) / window;
  const int32_t header[] = {window, vocab, n};
  file_.write(kMagic);
  file_.write(std::as_bytes(std::span(header)));
  file_.write(std::as_bytes(tokens));
  rows_left_ = int64_t{n} * (window - 1 - window / 2);
}

void LogitFileWriter::add(std::span<const float> logits) {
  CACHALOT_CHECK(static_cast<int>(logits.size()) == vocab_ && rows_left_ > 0, "{} logits, {} rows are left", logits.size(), rows_left_);
  row_.clear();
  append_stored_logits(logits, row_);
  file_.write(std::as_bytes(std::span(row_)));
  --rows_left_;
}

void LogitFileWriter::commit() {
  CACHALOT_CHECK(rows_left_ == 0, "{} rows are missing", rows_left_);
  file_.commit();
}

LogitFile::LogitFile(const std::filesystem::path& path) : name_(path.string()), file_(MappedFile::open(path)) {
  const auto bytes = file_->bytes();
  if (bytes.size() < kHeader || std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0)
    fail("{}: found no file of log-probabilities, which begins with \"{}\"", name_, kMagic);
  int32_t header[3];
  std::memcpy(header, bytes.data() + kMagic.size(), sizeof header);
  constexpr const char* kNames[] = {"window", "vocabulary", "windows"};
  constexpr int kLeast[] = {3, 1, 1};
  for (int i = 0; i < 3; ++i)
    if (header[i] < kLeast[i] || header[i] > 1 << 28)
      fail("{}: {}: found {}, expected {} to {}", name_, kNames[i], header[i], kLeast[i], 1 << 28);
  window_ = header[0];
  vocab_ = header[1];
  n_windows_ = header[2];
  const uint64_t n_tokens = static_cast<uint64_t>(window_) * static_cast<uint64_t>(n_windows_);
  const uint64_t n_rows = static_cast<uint64_t>(n_windows_) * static_cast<uint64_t>(rows_per_window());
  // Divided, so that hostile sizes do not wrap around.
  const uint64_t left = bytes.size() - kHeader, row_size = row_codes(vocab_) * sizeof(uint16_t);
  if (n_tokens > left / sizeof(int32_t) || n_rows > (left - n_tokens * sizeof(int32_t)) / row_size)
    fail("{}: found {} bytes, too few for {} windows of {} tokens and a vocabulary of {}", name_, bytes.size(), n_windows_, window_,
         vocab_);
  tokens_.resize(n_tokens);
  std::memcpy(tokens_.data(), bytes.data() + kHeader, n_tokens * sizeof(int32_t));
  for (size_t i = 0; i < tokens_.size(); ++i)
    if (tokens_[i] < 0 || tokens_[i] >= vocab_) fail("{}: token {}: found {}, expected 0 to {}", name_, i, tokens_[i], vocab_ - 1);
  rows_at_ = kHeader + n_tokens * sizeof(int32_t);
}

LogitFile::~LogitFile() = default;

StoredLogits LogitFile::row(int window, int i) const {
  CACHALOT_CHECK(window >= 0 && window < n_windows_ && i >= 0 && i < rows_per_window(), "row {} of window {}", i, window);
  const size_t index = static_cast<size_t>(window) * static_cast<size_t>(rows_per_window()) + static_cast<size_t>(i);
  const std::byte* const at = file_->bytes().data() + rows_at_ + index * row_codes(vocab_) * sizeof(uint16_t);
  StoredLogits out;
  std::memcpy(&out.scale, at, sizeof(float));
  std::memcpy(&out.least, at + sizeof(float), sizeof(float));
  out.codes = {reinterpret_cast<const uint16_t*>(at + 2 * sizeof(float)), static_cast<size_t>(vocab_)};
  return out;
}

}  // namespace cachalot
