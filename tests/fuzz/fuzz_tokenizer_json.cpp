// Any bytes as tokenizer.json: an Error, or a tokenizer that encodes and decodes a fixed text without harm.
#include <cstdint>
#include <cstdlib>

#include "base/error.h"
#include "text/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  // A line of three dashes parts tokenizer.json from tokenizer_config.json.
  const size_t cut = text.find("\n---\n");
  cachalot::TokenizerOptions options;
  if (cut != std::string_view::npos) options.tokenizer_config = text.substr(cut + 5);
  try {
    const auto tokenizer = cachalot::Tokenizer::from_json(text.substr(0, cut), "tokenizer.json", options);
    const std::string sample = "Hello, w\xC3\xB6rld 1234!\n\n  \xE4\xB8\xAD\xFF <|end|> aaaaaaaab";
    for (const bool special : {false, true}) {
      const auto ids = tokenizer.encode(sample, {.add_bos = true, .parse_special = special});
      for (const int id : ids)
        if (id < 0 || id >= tokenizer.size()) std::abort();
      (void)tokenizer.decode(ids);
    }
    const auto again = cachalot::Tokenizer::from_vocab(tokenizer.vocab());
    if (again.size() != tokenizer.size()) std::abort();
  } catch (const cachalot::Error&) {
  }
  return 0;
}
