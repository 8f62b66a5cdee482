// What a Tokenizer is made of; filled by the readers in tokenizer_json.cpp and tokenizer_vocab.cpp.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/pretokenizer.h"
#include "text/vocabulary.h"

namespace cachalot {

struct TokenizerParts {
  std::string name;
  Vocabulary vocabulary{0};
  Bpe bpe;
  PreTokenizer pre = PreTokenizer::of(PreFamily::kGpt2);
  bool nfc = false;              // normalise to NFC
  bool ignore_merges = false;    // a piece that is a token becomes that token, whatever the merges say
  AddedTokens raw_added;         // looked for in the text as it comes
  AddedTokens normalized_added;  // looked for in what lies between those, after normalisation
  std::optional<int> bos, eos, pad;
  std::vector<int> eos_ids;
  bool add_bos = false;
  std::string chat_template;
};

// Whether a token's spelling marks a role, a turn or a hole, so that a text must not be able to inject it.
bool looks_like_control(std::string_view text);

// Adds an end token, keeping the set sorted and unique.
void add_eos(TokenizerParts& parts, int id);

// "left right" to ids through `vocabulary`; Error naming `where` when a part or the result is no token. Appends to `bpe`.
void add_merge(Bpe& bpe, const Vocabulary& vocabulary, std::string_view left, std::string_view right, const std::string& list,
               size_t index);

}  // namespace cachalot
