// Encoding and decoding; the readers of files are in tokenizer_json.cpp and tokenizer_vocab.cpp.
#include "text/tokenizer.h"

#include <algorithm>
#include <bit>
#include <deque>
#include <functional>

#include "base/error.h"
#include "text/tokenizer_parts.h"
#include "text/unicode.h"

namespace cachalot {
namespace {

// One encode call: pieces in, ids out. Words repeat, so a direct-mapped cache remembers where in the output a piece's ids stand.
class Encoder final : public PieceSink {
 public:
  Encoder(const TokenizerParts& parts, size_t text_size) : parts_(parts), cache_(cache_slots(text_size)) {}

  void encode(std::string_view text, bool control) {
    for_segments(parts_.raw_added, text, control, [&](std::string_view segment) {
      if (parts_.nfc && !unicode::is_surely_nfc(segment)) segment = normalized_.emplace_back(unicode::nfc(segment));
      for_segments(parts_.normalized_added, segment, control, [&](std::string_view part) { parts_.pre.split(part, *this); });
    });
  }

  void piece(std::string_view bytes) override {
    CacheEntry& entry = cache_[std::hash<std::string_view>{}(bytes) & (cache_.size() - 1)];
    const size_t at = ids_.size();
    if (entry.key == bytes) {
      ids_.resize(at + entry.count);
      std::copy_n(ids_.begin() + static_cast<ptrdiff_t>(entry.at), entry.count, ids_.begin() + static_cast<ptrdiff_t>(at));
      return;
    }
    const auto whole = parts_.ignore_merges ? parts_.vocabulary.find_bytes(bytes) : std::nullopt;
    if (whole) {
      ids_.push_back(*whole);
    } else {
      parts_.bpe.encode(bytes, ids_);
    }
    entry = {bytes, at, ids_.size() - at};
  }

  std::vector<int> take() { return std::move(ids_); }

 private:
  struct CacheEntry {
    std::string_view key;  // into the text or normalized_, both of which outlive this object's use
    size_t at = 0, count = 0;
  };

  static size_t cache_slots(size_t text_size) { return std::bit_ceil(std::clamp<size_t>(text_size / 16, 64, 1u << 16)); }

  template <typename Sink>
  void for_segments(const AddedTokens& added, std::string_view text, bool control, Sink&& sink) {
    size_t at = 0;
    while (at < text.size()) {
      const auto match = added.empty() ? std::nullopt : added.find(text, at, control);
      const size_t end = match ? match->begin : text.size();
      if (at < end) sink(text.substr(at, end - at));
      if (!match) break;
      ids_.push_back(match->id);
      at = match->end;
    }
  }

  const TokenizerParts& parts_;
  std::vector<CacheEntry> cache_;
  std::deque<std::string> normalized_;
  std::vector<int> ids_;
};

}  // namespace

bool looks_like_control(std::string_view text) {
  const auto framed = [text](std::string_view open, std::string_view close) {
    return text.size() > open.size() + close.size() && text.starts_with(open) && text.ends_with(close);
  };
  return framed("<|", "|>") || framed("<｜", "｜>") || text == "<s>" || text == "</s>" || text == "<unk>" || text == "<pad>" ||
         text == "<mask>";
}

void add_eos(TokenizerParts& parts, int id) {
  const auto it = std::lower_bound(parts.eos_ids.begin(), parts.eos_ids.end(), id);
  if (it == parts.eos_ids.end() || *it != id) parts.eos_ids.insert(it, id);
}

void add_merge(Bpe& bpe, const Vocabulary& vocabulary, std::string_view left, std::string_view right, const std::string& list,
               size_t index) {
  const auto id_of = [&](std::string_view text) {
    const auto id = vocabulary.find_text(text);
    if (!id) fail("{}[{}]: found \"{}\", expected a token of the vocabulary", list, index, printable(text));
    return *id;
  };
  if (left.empty() || right.empty()) fail("{}[{}]: found an empty part, expected two tokens", list, index);
  const int left_id = id_of(left);
  const int right_id = id_of(right);
  std::string both(left);
  both += right;
  bpe.add_merge(left_id, right_id, id_of(both));
}

Tokenizer::Tokenizer(std::unique_ptr<const TokenizerParts> parts) : parts_(std::move(parts)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

std::vector<int> Tokenizer::encode(std::string_view text, EncodeOptions options) const {
  Encoder encoder(*parts_, text.size());
  encoder.encode(text, options.parse_special);
  std::vector<int> ids = encoder.take();
  if (options.add_bos && parts_->bos) {
    const bool has_bos = options.parse_special && !ids.empty() && ids.front() == *parts_->bos;
    if (!has_bos) ids.insert(ids.begin(), *parts_->bos);
  }
  return ids;
}

std::string Tokenizer::decode_bytes(std::span<const int> ids, bool skip_special) const {
  std::string out;
  for (const int id : ids) {
    if (!skip_special || !is_special(id)) out += piece(id);
  }
  return out;
}

std::string Tokenizer::decode(std::span<const int> ids, bool skip_special) const {
  return unicode::replace_invalid(decode_bytes(ids, skip_special));
}

const std::string& Tokenizer::name() const { return parts_->name; }
int Tokenizer::size() const { return parts_->vocabulary.size(); }
std::string_view Tokenizer::piece(int id) const { return parts_->vocabulary.piece(id); }
std::string_view Tokenizer::token_text(int id) const { return parts_->vocabulary.text(id); }
std::optional<int> Tokenizer::token_id(std::string_view text) const { return parts_->vocabulary.find_text(text); }
TokenKind Tokenizer::kind(int id) const { return parts_->vocabulary.kind(id); }
bool Tokenizer::is_special(int id) const { return kind(id) == TokenKind::kControl || kind(id) == TokenKind::kUnknown; }
std::optional<int> Tokenizer::bos() const { return parts_->bos; }
std::optional<int> Tokenizer::eos() const { return parts_->eos; }
std::optional<int> Tokenizer::pad() const { return parts_->pad; }
std::span<const int> Tokenizer::eos_ids() const { return parts_->eos_ids; }
bool Tokenizer::is_eos(int id) const { return std::binary_search(parts_->eos_ids.begin(), parts_->eos_ids.end(), id); }
bool Tokenizer::add_bos() const { return parts_->add_bos; }
const std::string& Tokenizer::chat_template() const { return parts_->chat_template; }

}  // namespace cachalot
