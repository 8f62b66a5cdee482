// Structured output for a request: a compiler of schemas, expressions and grammars for one vocabulary, and the constraint that it gives.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "cachalot/sampling.h"
#include "grammar/matcher.h"

namespace cachalot {

struct GrammarSource {
  enum class Kind : uint8_t { json_object, json_schema, regex, gbnf };
  Kind kind = Kind::json_object;
  std::string text;  // of the schema, expression or grammar
};

struct ConstraintOptions {
  // Everything is free until this text has appeared: the end of a reasoning part. Empty: strict from the first token.
  std::string free_until;
  int free_until_token = -1;  // or until this token
};

class GrammarCompiler {
 public:
  // token_bytes: what each token adds to a text; empty for control tokens, which only a grammar that names them lets pass.
  GrammarCompiler(std::vector<std::string> token_bytes, std::vector<int> eos_ids, size_t cache_bytes = size_t{64} << 20);

  // Compiles, or finds what was compiled before. Thread-safe. Throws Error for what is malformed or cannot be honoured.
  std::shared_ptr<const CompiledGrammar> compile(const GrammarSource& source);
  [[nodiscard]] std::shared_ptr<const CompiledGrammar> compile(const Grammar& grammar) const;  // not kept

  // Finds out beforehand what all JSON schemas ask: a tenth of a second at start, rather than within a request.
  void warm_up();

  [[nodiscard]] static std::shared_ptr<TokenConstraint> constraint(std::shared_ptr<const CompiledGrammar> grammar,
                                                                   ConstraintOptions options = {});

 private:
  std::shared_ptr<const TokenTrie> trie_;
  std::vector<int> eos_ids_;
  size_t cache_bytes_;
  std::shared_ptr<CompiledGrammar::Shared> shared_;
  struct Entry {
    std::string key;
    std::shared_ptr<const CompiledGrammar> grammar;
  };
  std::mutex mutex_;
  std::list<Entry> recent_;  // latest first
};

}  // namespace cachalot
