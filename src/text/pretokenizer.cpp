// The families' published steps, dispatch to the hand-written rules, and reading a tokenizer.json's pre_tokenizer.
#include "text/pretokenizer.h"

#include "base/error.h"
#include "text/regex_splitter.h"
#include "text/split_rules.h"

namespace cachalot {
namespace {

constexpr const char* kGpt2Regex = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr const char* kLlama3Regex =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kQwen2Regex =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
// The line breaks stand as themselves in this file's pattern.
constexpr const char* kDeepseekV3Regex =
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+";
// clang-format off
constexpr const char* kDeepseekLlmLetters =
    "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷ"
    "ᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄ"
    "Ⰰ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";
// clang-format on
constexpr const char* kEastAsian = "[一-龥ࠀ-一가-\xED\x9F\xBF]+";
constexpr const char* kHanKana = "[一-龥\u3040-ゟ゠-ヿ]+";

std::vector<SplitStep> isolating(std::initializer_list<const char*> regexes) {
  std::vector<SplitStep> steps;
  for (const char* regex : regexes) steps.push_back({.regex = regex});
  return steps;
}

constexpr PreFamily kFamilies[] = {PreFamily::kGpt2,        PreFamily::kSmollm,        PreFamily::kLlama3,    PreFamily::kQwen2,
                                   PreFamily::kDeepseekLlm, PreFamily::kDeepseekCoder, PreFamily::kDeepseekV3};

SplitStep split_step(const JsonValue& value) {
  SplitStep step;
  const JsonValue pattern = value.at("pattern");
  if (const auto regex = pattern.find("Regex")) {
    step.regex = regex->string();
  } else {
    step.regex = pattern.at("String").string();
    step.literal = true;
  }
  step.invert = value.boolean_or("invert", false);
  const std::string_view behavior = value.at("behavior").string();
  step.remove_matches = behavior == "Removed";
  if (!step.remove_matches && behavior != "Isolated")
    fail("{}: behavior: found \"{}\", expected Isolated or Removed", value.where(), printable(behavior));
  return step;
}

// Appends the steps of one element; true when it was ByteLevel.
bool read_step(const JsonValue& value, std::vector<SplitStep>& steps) {
  const std::string_view type = value.at("type").string();
  if (type == "Split") {
    steps.push_back(split_step(value));
  } else if (type == "Digits") {
    steps.push_back({.regex = value.boolean_or("individual_digits", false) ? R"(\p{N})" : R"(\p{N}+)"});
  } else if (type == "ByteLevel") {
    if (value.boolean_or("add_prefix_space", true)) fail("{}: add_prefix_space: found true, expected false", value.where());
    if (value.boolean_or("use_regex", true)) steps.push_back({.regex = kGpt2Regex});
    return true;
  } else {
    fail("{}: type: found \"{}\", expected Split, Digits, ByteLevel or Sequence", value.where(), printable(type));
  }
  return false;
}

}  // namespace

std::vector<SplitStep> PreTokenizer::steps_of(PreFamily family) {
  switch (family) {
    case PreFamily::kGpt2: return isolating({kGpt2Regex});
    case PreFamily::kSmollm: return isolating({R"(\p{N})", kGpt2Regex});
    case PreFamily::kLlama3: return isolating({kLlama3Regex});
    case PreFamily::kQwen2: return isolating({kQwen2Regex});
    case PreFamily::kDeepseekLlm:
      return isolating({"[\r\n]", kDeepseekLlmLetters, "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", "\\s+$", kEastAsian, R"(\p{N}+)"});
    case PreFamily::kDeepseekCoder: return isolating({"[\r\n]", R"(\s?\p{L}+)", R"(\s?\p{P}+)", kEastAsian, R"(\p{N})"});
    case PreFamily::kDeepseekV3: return isolating({R"(\p{N}{1,3})", kHanKana, kDeepseekV3Regex});
    case PreFamily::kOther: break;
  }
  return {};
}

PreTokenizer PreTokenizer::of(PreFamily family) {
  PreTokenizer out;
  out.family_ = family;
  return out;
}

PreTokenizer PreTokenizer::from_steps(const std::vector<SplitStep>& steps, const std::string& where) {
  for (const PreFamily family : kFamilies)
    if (steps == steps_of(family)) return of(family);
  return compiled(steps, where);
}

PreTokenizer PreTokenizer::compiled(const std::vector<SplitStep>& steps, const std::string& where) {
  PreTokenizer out;
  for (const SplitStep& step : steps) out.regexes_.push_back(std::make_unique<RegexSplitter>(step, where));
  return out;
}

PreTokenizer PreTokenizer::from_json(const JsonValue& value) {
  std::vector<SplitStep> steps;
  bool byte_level = false;
  if (value.at("type").string() == "Sequence") {
    constexpr size_t kMaxSteps = 32;
    const JsonValue list = value.at("pretokenizers");
    const auto array = list.array();
    if (array.size() > kMaxSteps) fail("{}: found {} steps, expected at most {}", list.where(), array.size(), kMaxSteps);
    size_t i = 0;
    for (const auto element : array) {
      const JsonValue step(element, fmt::format("{}[{}]", list.where(), i++));
      if (byte_level) fail("{}: found a step behind ByteLevel, expected ByteLevel to be the last", step.where());
      byte_level = read_step(step, steps);
    }
  } else {
    byte_level = read_step(value, steps);
  }
  if (!byte_level) fail("{}: found no ByteLevel step, expected a byte-level tokenizer", value.where());
  return from_steps(steps, value.where());
}

PreTokenizer::PreTokenizer(PreTokenizer&&) noexcept = default;
PreTokenizer& PreTokenizer::operator=(PreTokenizer&&) noexcept = default;
PreTokenizer::~PreTokenizer() = default;

void PreTokenizer::split(std::string_view text, PieceSink& sink) const {
  using namespace split;
  const uint8_t* const table = unicode::flag_table();
  const auto emit = [&sink](std::string_view piece) { sink.piece(piece); };
  switch (family_) {
    case PreFamily::kGpt2: return cascade<Gpt2Words>(text, table, emit);
    case PreFamily::kSmollm: return cascade<DigitGroups<1>, Gpt2Words>(text, table, emit);
    case PreFamily::kLlama3: return cascade<Llama3Words<3>>(text, table, emit);
    case PreFamily::kQwen2: return cascade<Llama3Words<1>>(text, table, emit);
    case PreFamily::kDeepseekLlm:
      return cascade<SingleNewline, SpacedRuns<CasedLetters>, SpacedRuns<ListedPunctuation>, TrailingSpaces, EastAsianRuns, NumberRuns>(
          text, table, emit);
    case PreFamily::kDeepseekCoder:
      return cascade<SingleNewline, SpacedRuns<Letters>, SpacedRuns<Punctuation>, EastAsianRuns, DigitGroups<1>>(text, table, emit);
    case PreFamily::kDeepseekV3: return cascade<DigitGroups<3>, HanKanaRuns, DeepseekV3Words>(text, table, emit);
    case PreFamily::kOther: break;
  }
  const std::function<void(std::string_view, size_t)> descend = [&](std::string_view piece, size_t step) {
    if (step == regexes_.size()) return sink.piece(piece);
    regexes_[step]->split(piece, [&](std::string_view part) { descend(part, step + 1); });
  };
  if (!text.empty()) descend(text, 0);
}

}  // namespace cachalot
