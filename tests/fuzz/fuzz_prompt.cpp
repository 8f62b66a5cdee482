// Any bytes as a prompt, for every pre-tokenizer family: decoding gives the bytes back, and no control token comes of a user's text.
// CACHALOT_FUZZ_TOKENIZER names a tokenizer.json to use instead of the built-in byte vocabulary.
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <vector>

#include "text/detokenizer.h"
#include "text/tokenizer.h"
#include "text/unicode.h"

namespace {

using cachalot::Tokenizer;

std::vector<Tokenizer> make_tokenizers() {
  std::vector<Tokenizer> out;
  if (const char* path = std::getenv("CACHALOT_FUZZ_TOKENIZER")) {
    std::ifstream in(path, std::ios::binary);
    std::ostringstream text;
    text << in.rdbuf();
    out.push_back(Tokenizer::from_json(text.str(), path));
    return out;
  }
  cachalot::VocabData data{.name = "built in", .model = "gpt2"};
  for (int byte = 0; byte < 256; ++byte) {
    const char c = static_cast<char>(byte);
    data.tokens.push_back(cachalot::unicode::bytes_to_alphabet({&c, 1}));
  }
  for (const auto* merge : {"a a", "aa aa", "Ġ a", "Ġ Ġ", "e r", "t h", "th er", "ä ¸", "1 2"}) {
    const std::string text = merge;
    const size_t space = text.find(' ');
    data.merges.push_back(text);
    data.tokens.push_back(text.substr(0, space) + text.substr(space + 1));
  }
  data.types.assign(data.tokens.size(), 1);
  data.tokens.insert(data.tokens.end(), {"<|bos|>", "<|end|>", "<think>"});
  data.types.insert(data.types.end(), {3, 3, 4});
  data.bos = static_cast<int64_t>(data.tokens.size() - 3);
  for (const char* pre : {"gpt-2", "smollm", "llama-bpe", "deepseek-r1-qwen", "deepseek-llm", "deepseek-coder", "deepseek-v3", "qwen2"}) {
    data.pre = pre;
    out.push_back(Tokenizer::from_vocab(data));
  }
  return out;
}

void check(const Tokenizer& tokenizer, const std::string& text, bool special) {
  const auto ids = tokenizer.encode(text, {.add_bos = false, .parse_special = special});
  if (tokenizer.decode_bytes(ids) != text) std::abort();
  cachalot::Detokenizer stream(tokenizer);
  std::string streamed;
  for (const int id : ids) {
    if (!special && tokenizer.is_special(id)) std::abort();
    streamed += stream.push(id);
  }
  streamed += stream.finish();
  if (streamed != cachalot::unicode::replace_invalid(text)) std::abort();
  const auto with_bos = tokenizer.encode(text, {.add_bos = true, .parse_special = special});
  if (tokenizer.bos() && with_bos.front() != *tokenizer.bos()) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::vector<Tokenizer> tokenizers = make_tokenizers();
  if (size == 0) return 0;
  // The first byte chooses the family.
  const size_t family = data[0] % tokenizers.size();
  const std::string raw(reinterpret_cast<const char*>(data + 1), size - 1);
  const std::string composed = cachalot::unicode::nfc(raw);
  if (cachalot::unicode::nfc(composed) != composed) std::abort();
  // Composed text is what every tokenizer gives back; the raw text only those without normaliser.
  for (const bool special : {false, true}) check(tokenizers[family], composed, special);
  if (family + 1 < tokenizers.size()) check(tokenizers[family], raw, false);
  return 0;
}
