// Text to token ids and back: byte-level BPE read from a tokenizer.json or from GGUF metadata.
//
// Any bytes can be encoded. Well-formed UTF-8 gives the ids of the reference library (Hugging Face tokenizers); a byte that is not
// part of it counts as a character without properties and encodes as itself, where the reference could only see U+FFFD in its place.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/vocabulary.h"

namespace cachalot {

struct TokenizerParts;

struct TokenizerOptions {
  std::string_view tokenizer_config;   // text of tokenizer_config.json, or empty
  std::string_view generation_config;  // text of generation_config.json, or empty
  std::string_view chat_template;      // text of chat_template.jinja, or empty; goes before tokenizer_config.json's
  std::vector<int> eos_ids;            // further end tokens, such as config.json's; joined with those of the files
  std::optional<bool> add_bos;         // overrides what the files say
};

// What GGUF metadata holds under tokenizer.*, as plain data. Ids are 64 bits wide as they come from a file unchecked.
struct VocabData {
  std::string name;                 // file name for error messages
  std::string model;                // tokenizer.ggml.model: gpt2
  std::string pre;                  // tokenizer.ggml.pre; empty means default
  std::vector<std::string> tokens;  // normal ones in GPT-2's byte alphabet
  std::vector<int32_t> types;       // as TokenKind; empty: all normal
  std::vector<std::string> merges;  // "left right"
  std::optional<int64_t> bos, eos, eot, eom, pad, unknown;
  std::optional<bool> add_bos;
  std::string chat_template;
};

struct EncodeOptions {
  // Begin with BOS, unless the text itself does (parse_special), or there is none.
  bool add_bos = false;
  // Recognise control tokens in the text. Off, their spelling is ordinary text: for anything that a user wrote. User-defined tokens
  // are found either way.
  bool parse_special = false;
};

class Tokenizer {
 public:
  // `name` (the file's) starts each error message. Errors: Error naming the field, what was found and what was expected, for
  // malformed input and for anything but byte-level BPE.
  static Tokenizer from_json(std::string_view text, std::string name, const TokenizerOptions& options = {});
  // Errors: Error naming the metadata key, also for a `model` or `pre` that is not supported.
  static Tokenizer from_vocab(const VocabData& data);

  // What a GGUF file would hold, padded with unused tokens to `n_rows` (the rows of the embedding) when that is more than size().
  // Errors: Error when GGUF has no name for this pre-tokenizer.
  [[nodiscard]] VocabData vocab(int n_rows = 0) const;

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  // O(n log n) at worst, in practice linear. Safe to call from several threads.
  [[nodiscard]] std::vector<int> encode(std::string_view text, EncodeOptions options = {}) const;
  // The bytes of all ids in order, each maximal invalid part as U+FFFD; ids out of range give nothing.
  [[nodiscard]] std::string decode(std::span<const int> ids, bool skip_special = false) const;
  // The same before replacement: may be no valid UTF-8.
  [[nodiscard]] std::string decode_bytes(std::span<const int> ids, bool skip_special = false) const;

  [[nodiscard]] const std::string& name() const;
  [[nodiscard]] int size() const;                                          // highest id + 1
  [[nodiscard]] std::string_view piece(int id) const;                      // bytes; empty out of range
  [[nodiscard]] std::string_view token_text(int id) const;                 // the file's spelling
  [[nodiscard]] std::optional<int> token_id(std::string_view text) const;  // by the file's spelling
  [[nodiscard]] TokenKind kind(int id) const;
  // Control tokens and the unknown token: never part of an answer's text. Includes tokens that a file forgot to mark as special but
  // whose spelling is a role or turn mark, such as <|User|>.
  [[nodiscard]] bool is_special(int id) const;

  [[nodiscard]] std::optional<int> bos() const;
  [[nodiscard]] std::optional<int> eos() const;  // the main end token
  [[nodiscard]] std::optional<int> pad() const;
  [[nodiscard]] std::span<const int> eos_ids() const;  // all end tokens that any file names, sorted
  [[nodiscard]] bool is_eos(int id) const;
  [[nodiscard]] bool add_bos() const;                      // whether the files ask for BOS before a raw text
  [[nodiscard]] const std::string& chat_template() const;  // empty when there is none

 private:
  explicit Tokenizer(std::unique_ptr<const TokenizerParts> parts);
  std::unique_ptr<const TokenizerParts> parts_;
};

}  // namespace cachalot
