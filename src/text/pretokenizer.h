// Cutting text into the pieces inside which BPE merges: the step that differs most between tokenizer families. The families we
// know are split by hand-written code, linear in the input; any other tokenizer.json goes through PCRE2 with limits.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace cachalot {

enum class PreFamily { kGpt2, kSmollm, kLlama3, kQwen2, kDeepseekLlm, kDeepseekCoder, kDeepseekV3, kOther };

// Receives the pieces in order; together they are the text, except where a step of kOther removes something.
class PieceSink {
 public:
  virtual void piece(std::string_view piece) = 0;

 protected:
  ~PieceSink() = default;
};

// One step of a tokenizer.json's pre_tokenizer, in the words of that file. ByteLevel without a regex is no step.
struct SplitStep {
  std::string regex;            // Oniguruma syntax; \p{N} for Digits
  bool literal = false;         // the pattern is plain text
  bool remove_matches = false;  // behaviour Removed: matches are dropped instead of becoming pieces of their own
  bool invert = false;          // matches and the text between them change places

  bool operator==(const SplitStep&) const = default;
};

class RegexSplitter;

class PreTokenizer {
 public:
  // The steps of a family as published; kOther has none. Used to recognise files, and by tests as the slow twin.
  static std::vector<SplitStep> steps_of(PreFamily family);

  static PreTokenizer of(PreFamily family);
  // Recognises a known family by its steps, else compiles them. Errors: Error naming `where` for a pattern that does not compile.
  static PreTokenizer from_steps(const std::vector<SplitStep>& steps, const std::string& where);
  // Compiles the steps even where a family is known.
  static PreTokenizer compiled(const std::vector<SplitStep>& steps, const std::string& where);
  // The "pre_tokenizer" object of a tokenizer.json: Split (Isolated or Removed), Digits, ByteLevel, or a Sequence of them that ends
  // in ByteLevel. Errors: Error naming the field for anything else.
  static PreTokenizer from_json(const JsonValue& value);

  PreTokenizer(PreTokenizer&&) noexcept;
  PreTokenizer& operator=(PreTokenizer&&) noexcept;
  ~PreTokenizer();

  [[nodiscard]] PreFamily family() const { return family_; }
  // Errors: Error when a pattern of kOther passes its match or time limit.
  void split(std::string_view text, PieceSink& sink) const;

 private:
  PreTokenizer() = default;
  PreFamily family_ = PreFamily::kOther;
  std::vector<std::unique_ptr<RegexSplitter>> regexes_;
};

}  // namespace cachalot
