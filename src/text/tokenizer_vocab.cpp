// Tokenizers from GGUF metadata and back.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "text/tokenizer.h"
#include "text/tokenizer_parts.h"

namespace cachalot {
namespace {

// A value of tokenizer.ggml.pre. The first entry of a family with the same `nfc` is the one written.
struct PreName {
  std::string_view name;
  PreFamily family;
  bool nfc = false;
};
// Files say "default" when their converter did not know the tokenizer; GPT-2's rules are the root of the others.
constexpr PreName kPreNames[] = {
    {"gpt-2", PreFamily::kGpt2},
    {"smollm", PreFamily::kSmollm},
    {"llama-bpe", PreFamily::kLlama3},
    {"qwen2", PreFamily::kQwen2, true},
    {"deepseek-r1-qwen", PreFamily::kQwen2},
    {"deepseek-llm", PreFamily::kDeepseekLlm},
    {"deepseek-coder", PreFamily::kDeepseekCoder},
    {"deepseek-v3", PreFamily::kDeepseekV3},
    {"default", PreFamily::kGpt2},
    {"phi-2", PreFamily::kGpt2},
    {"llama3", PreFamily::kLlama3},
    {"llama-v3", PreFamily::kLlama3},
    {"falcon3", PreFamily::kLlama3},
};

const PreName& find_pre(const VocabData& data) {
  const std::string_view wanted = data.pre.empty() ? std::string_view("default") : std::string_view(data.pre);
  for (const PreName& entry : kPreNames) {
    if (entry.name == wanted) return entry;
  }
  std::string names;
  for (const PreName& entry : kPreNames) names += fmt::format("{}{}", names.empty() ? "" : ", ", entry.name);
  fail("{}: tokenizer.ggml.pre: found \"{}\", expected one of {}", data.name, printable(data.pre), names);
}

// "<0x0A>" to 10.
std::optional<uint8_t> byte_token(std::string_view text) {
  if (text.size() != 6 || !text.starts_with("<0x") || text.back() != '>') return std::nullopt;
  int value = 0;
  for (const char c : text.substr(3, 2)) {
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (digit < 0) return std::nullopt;
    value = value * 16 + digit;
  }
  return static_cast<uint8_t>(value);
}

void read_token(const VocabData& data, size_t index, TokenizerParts& parts) {
  const std::string& text = data.tokens[index];
  const int id = static_cast<int>(index);
  if (text.empty()) fail("{}: tokenizer.ggml.tokens[{}]: found an empty token, expected text", data.name, index);
  const int32_t type = data.types.empty() ? 1 : data.types[index];
  if (type < 1 || type > 6) fail("{}: tokenizer.ggml.token_type[{}]: found {}, expected 1 to 6", data.name, index, type);
  const auto kind = static_cast<TokenKind>(type);
  if (kind == TokenKind::kByte) {
    const auto byte = byte_token(text);
    if (!byte)
      fail("{}: tokenizer.ggml.tokens[{}]: found the byte token \"{}\", expected <0x00> to <0xFF>", data.name, index, printable(text));
    parts.vocabulary.set_byte(id, text, *byte);
    return;
  }
  parts.vocabulary.set(id, text, kind);
  if (kind != TokenKind::kControl && kind != TokenKind::kUserDefined) return;
  if (text.size() > kMaxAddedToken)
    fail("{}: tokenizer.ggml.tokens[{}]: found {} bytes, expected at most {}", data.name, index, text.size(), kMaxAddedToken);
  const bool control = kind == TokenKind::kControl || looks_like_control(text);
  if (control) parts.vocabulary.set_kind(id, TokenKind::kControl);
  parts.raw_added.add(text, {.id = id, .control = control});
}

std::optional<int> checked_id(const VocabData& data, const char* key, std::optional<int64_t> id) {
  if (id && (*id < 0 || *id >= static_cast<int64_t>(data.tokens.size())))
    fail("{}: tokenizer.ggml.{}: found {}, expected 0 to {}", data.name, key, *id, data.tokens.size() - 1);
  return id ? std::optional(static_cast<int>(*id)) : std::nullopt;
}

}  // namespace

Tokenizer Tokenizer::from_vocab(const VocabData& data) {
  if (data.model != "gpt2")
    fail("{}: tokenizer.ggml.model: found \"{}\", expected gpt2 (byte-level BPE)", data.name, printable(data.model));
  const PreName& pre = find_pre(data);
  if (data.tokens.empty() || data.tokens.size() > static_cast<size_t>(kMaxTokens))
    fail("{}: tokenizer.ggml.tokens: found {} tokens, expected 1 to {}", data.name, data.tokens.size(), kMaxTokens);
  if (!data.types.empty() && data.types.size() != data.tokens.size())
    fail("{}: tokenizer.ggml.token_type: found {} entries, expected {} as of tokens", data.name, data.types.size(), data.tokens.size());
  if (data.merges.size() > kMaxMerges)
    fail("{}: tokenizer.ggml.merges: found {} merges, expected at most {}", data.name, data.merges.size(), kMaxMerges);

  auto parts = std::make_unique<TokenizerParts>();
  parts->name = data.name;
  parts->pre = PreTokenizer::of(pre.family);
  parts->nfc = pre.nfc;
  parts->ignore_merges = pre.family == PreFamily::kLlama3;
  parts->vocabulary = Vocabulary(data.tokens.size());
  for (size_t i = 0; i < data.tokens.size(); ++i) read_token(data, i, *parts);

  parts->bpe = Bpe(data.merges.size());
  const std::string list = data.name + ": tokenizer.ggml.merges";
  for (size_t i = 0; i < data.merges.size(); ++i) {
    const std::string_view text = data.merges[i];
    // The first character may itself be a space in files whose merges are not in the byte alphabet.
    const size_t space = text.empty() ? std::string_view::npos : text.find(' ', 1);
    if (space == std::string_view::npos)
      fail("{}[{}]: found \"{}\", expected two tokens with a space between them", list, i, printable(text));
    add_merge(parts->bpe, parts->vocabulary, text.substr(0, space), text.substr(space + 1), list, i);
  }
  parts->bpe.set_bytes(parts->vocabulary, checked_id(data, "unknown_token_id", data.unknown).value_or(-1));

  parts->bos = checked_id(data, "bos_token_id", data.bos);
  parts->eos = checked_id(data, "eos_token_id", data.eos);
  parts->pad = checked_id(data, "padding_token_id", data.pad);
  for (const auto id : {parts->eos, checked_id(data, "eot_token_id", data.eot), checked_id(data, "eom_token_id", data.eom)}) {
    if (id) add_eos(*parts, *id);
  }
  parts->add_bos = data.add_bos.value_or(pre.family == PreFamily::kLlama3) && parts->bos;
  parts->chat_template = data.chat_template;
  return Tokenizer(std::move(parts));
}

VocabData Tokenizer::vocab(int n_rows) const {
  const TokenizerParts& parts = *parts_;
  const auto pre = std::find_if(std::begin(kPreNames), std::end(kPreNames),
                                [&parts](const PreName& entry) { return entry.family == parts.pre.family() && entry.nfc == parts.nfc; });
  if (pre == std::end(kPreNames) || parts.ignore_merges != (parts.pre.family() == PreFamily::kLlama3))
    fail("{}: found a pre-tokenizer, normalizer and ignore_merges that GGUF has no common name for, expected a known family", parts.name);
  if (n_rows > kMaxTokens) fail("{}: found {} rows of embeddings, expected at most {}", parts.name, n_rows, kMaxTokens);

  VocabData data{.name = parts.name, .model = "gpt2", .pre = std::string(pre->name)};
  const int n = std::max(size(), n_rows);
  for (int id = 0; id < n; ++id) {
    const TokenKind kind = parts.vocabulary.kind(id);
    const bool unused = parts.vocabulary.text(id).empty();
    data.tokens.push_back(unused ? fmt::format("[PAD{}]", id) : std::string(parts.vocabulary.text(id)));
    data.types.push_back(static_cast<int32_t>(unused ? TokenKind::kUnused : kind));
  }
  for (const Bpe::Merge& merge : parts.bpe.merges())
    data.merges.push_back(fmt::format("{} {}", parts.vocabulary.text(merge.left), parts.vocabulary.text(merge.right)));
  const auto wide = [](std::optional<int> id) { return id ? std::optional<int64_t>(*id) : std::nullopt; };
  data.bos = wide(parts.bos);
  data.eos = wide(parts.eos);
  data.pad = wide(parts.pad);
  for (const int id : parts.eos_ids) {
    if (id == parts.eos || !parts.vocabulary.contains(id)) continue;
    if (!data.eot) {
      data.eot = id;
    } else if (!data.eom) {
      data.eom = id;
    }
  }
  data.add_bos = parts.add_bos;
  data.chat_template = parts.chat_template;
  return data;
}

}  // namespace cachalot
