// GrammarCompiler and the constraint that follows one text.
#include "grammar/constraint.h"

#include <algorithm>

#include "base/error.h"
#include "grammar/gbnf.h"
#include "grammar/json_schema.h"
#include "grammar/regex.h"

namespace cachalot {
namespace {

constexpr size_t kMaxSource = size_t{1} << 20;  // bytes of a schema, expression or grammar
constexpr size_t kMaxRecent = 16;               // compiled grammars kept; each may hold cache_bytes / 16 of masks

class GrammarConstraint : public TokenConstraint {
 public:
  GrammarConstraint(std::shared_ptr<const CompiledGrammar> grammar, ConstraintOptions options)
      : grammar_(std::move(grammar)),
        options_(std::move(options)),
        free_(!options_.free_until.empty() || options_.free_until_token >= 0),
        at_(grammar_->start(stacks_)) {}

  std::span<const uint32_t> allowed() override {
    if (free_) return {};
    if (!mask_) mask_ = grammar_->mask(at_, stacks_);
    return *mask_;
  }

  bool accept(int token) override {
    const TokenTrie& trie = grammar_->trie();
    if (token < 0 || token >= trie.n_vocab()) return false;
    if (free_) {
      accept_free(token);
      return true;
    }
    for (const int eos : grammar_->eos_ids())
      if (token == eos && at_.ended) return true;
    const std::string& bytes = trie.bytes(token);
    Position next = bytes.empty() ? grammar_->step_token(at_, token, stacks_) : at_;
    for (const char c : bytes) {
      next = grammar_->step(next, static_cast<uint8_t>(c), stacks_);
      if (next.items.empty() && !next.ended) break;
    }
    // A token that a grammar names may also have bytes.
    if (next.items.empty() && !next.ended && !bytes.empty()) next = grammar_->step_token(at_, token, stacks_);
    if (next.items.empty() && !next.ended) {
      if (mask_ && ((*mask_)[static_cast<size_t>(token) / 32] >> (token % 32) & 1u) != 0)
        fail("the grammar is too ambiguous: a text so far is in more than {} places", CompiledGrammar::kMaxItems);
      return false;
    }
    at_ = std::move(next);
    mask_.reset();
    return true;
  }

 private:
  void accept_free(int token) {
    if (token == options_.free_until_token) free_ = false;
    if (options_.free_until.empty()) return;
    tail_ += grammar_->trie().bytes(token);
    if (tail_.find(options_.free_until) != std::string::npos) free_ = false;
    const size_t keep = options_.free_until.size() - 1;
    if (tail_.size() > keep) tail_.erase(0, tail_.size() - keep);
  }

  std::shared_ptr<const CompiledGrammar> grammar_;
  ConstraintOptions options_;
  bool free_;
  CallStacks stacks_;
  Position at_;
  std::shared_ptr<const TokenMask> mask_;
  std::string tail_;  // last bytes of the free part
};

Grammar parse(const GrammarSource& source) {
  if (source.text.size() > kMaxSource) fail("the schema or grammar has {} bytes, expected at most {}", source.text.size(), kMaxSource);
  switch (source.kind) {
    case GrammarSource::Kind::json_object: return json_object_grammar();
    case GrammarSource::Kind::json_schema: return parse_json_schema(source.text);
    case GrammarSource::Kind::gbnf: return parse_gbnf(source.text);
    case GrammarSource::Kind::regex: break;
  }
  Grammar g;
  g.root = g.add_rule("root");
  const Grammar::Expr e = parse_regex(g, source.text, {});
  g.define(g.root, e);
  return g;
}

}  // namespace

GrammarCompiler::GrammarCompiler(std::vector<std::string> token_bytes, std::vector<int> eos_ids, size_t cache_bytes)
    : trie_(std::make_shared<TokenTrie>(token_bytes)),
      eos_ids_(std::move(eos_ids)),
      cache_bytes_(cache_bytes),
      shared_(CompiledGrammar::make_shared_states()) {}

void GrammarCompiler::warm_up() {
  const auto limited =
      compile({GrammarSource::Kind::json_schema, R"({"type":"array","items":{"type":["string","number"],"maxLength":9}})"});
  const auto any = compile({GrammarSource::Kind::json_object, ""});
  const auto address = compile({GrammarSource::Kind::json_schema, R"({"type":"string","format":"email"})"});
  const std::pair<std::shared_ptr<const CompiledGrammar>, const char*> samples[] = {
      {limited, "[\"\\n\\u0041a\xC3\xA9\", -1.5e7]"}, {any, R"({"\n\u0041a": ["b", 1.5]})"}, {address, R"("a.b@c-d.ef")"}};
  for (const auto& [grammar, text] : samples) {
    CallStacks stacks;
    Position at = grammar->start(stacks);
    for (const char* c = text; *c != 0; ++c) {
      grammar->mask(at, stacks);
      at = grammar->step(at, static_cast<uint8_t>(*c), stacks);
    }
  }
}

std::shared_ptr<const CompiledGrammar> GrammarCompiler::compile(const Grammar& grammar) const {
  return std::make_shared<CompiledGrammar>(grammar, trie_, eos_ids_, cache_bytes_ / kMaxRecent, shared_);
}

std::shared_ptr<const CompiledGrammar> GrammarCompiler::compile(const GrammarSource& source) {
  const std::string key = std::to_string(static_cast<int>(source.kind)) + source.text;
  {
    const std::lock_guard lock(mutex_);
    for (auto entry = recent_.begin(); entry != recent_.end(); ++entry)
      if (entry->key == key) {
        recent_.splice(recent_.begin(), recent_, entry);
        return recent_.front().grammar;
      }
  }
  auto compiled = compile(parse(source));
  CallStacks stacks;
  const auto first = compiled->mask(compiled->start(stacks), stacks);  // the first token shall not wait for it
  if (std::all_of(first->begin(), first->end(), [](uint32_t word) { return word == 0; }))
    fail("no token of this model can begin a text that the grammar matches (rules that call rules are followed {} deep before a byte)",
         CompiledGrammar::kMaxItems);
  const std::lock_guard lock(mutex_);
  recent_.push_front({key, compiled});
  if (recent_.size() > kMaxRecent) recent_.pop_back();
  return compiled;
}

std::shared_ptr<TokenConstraint> GrammarCompiler::constraint(std::shared_ptr<const CompiledGrammar> grammar, ConstraintOptions options) {
  return std::make_shared<GrammarConstraint>(std::move(grammar), std::move(options));
}

}  // namespace cachalot
