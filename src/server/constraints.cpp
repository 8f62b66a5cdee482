// Requests' shapes in the words of src/grammar.
#include "server/constraints.h"

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "grammar/constraint.h"
#include "grammar/grammar.h"
#include "grammar/json_schema.h"

namespace cachalot::server {
namespace {

constexpr std::string_view kReasoningEnd = "</think>";

// An expression that matches exactly these texts.
std::string regex_of(const std::vector<std::string>& choices) {
  std::string out = "(?:";
  for (size_t i = 0; i < choices.size(); ++i) {
    if (i > 0) out += '|';
    for (const char c : choices[i]) {
      if (std::string_view("\\^$.|?*+()[]{}/-").find(c) != std::string_view::npos) out += '\\';
      out += c;
    }
  }
  return out + ")";
}

GrammarSource source_of(const ConstraintSpec& spec) {
  using Kind = ConstraintSpec::Kind;
  switch (spec.kind) {
    case Kind::json_schema: return {GrammarSource::Kind::json_schema, spec.text};
    case Kind::regex: return {GrammarSource::Kind::regex, spec.text};
    case Kind::choice: return {GrammarSource::Kind::regex, regex_of(spec.choices)};
    case Kind::grammar: return {GrammarSource::Kind::gbnf, spec.text};
    default: return {GrammarSource::Kind::json_object, {}};
  }
}

// One call or more, in the model's own format, each with arguments that its tool's schema allows.
class CallGrammar {
 public:
  CallGrammar(const Tokenizer& tokenizer, const ConstraintSpec& spec) : tokenizer_(tokenizer), spec_(spec) {}

  Grammar build() {
    const int max_calls = spec_.one_call ? 1 : kMaxCalls;
    std::vector<Grammar::Expr> calls;
    for (const auto& tool : spec_.tools) {
      const auto& function = tool["function"];
      const int schema =
          add_json_schema(grammar_, function["parameters"].dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
      calls.push_back(call(function["name"].get<std::string>(), grammar_.rule(schema)));
    }
    const int any = grammar_.add_rule("call");
    grammar_.define(any, grammar_.choice(calls));
    const int root = grammar_.add_rule("calls");
    grammar_.define(root, all(grammar_.rule(any), max_calls));
    grammar_.root = root;
    return std::move(grammar_);
  }

 private:
  static constexpr int kMaxCalls = 16;

  // Where the vocabulary has a token for a mark, that token; else its letters.
  Grammar::Expr mark(std::string_view text) {
    const auto id = tokenizer_.token_id(text);
    const bool whole = id && (tokenizer_.is_special(*id) || tokenizer_.kind(*id) == TokenKind::kUserDefined);
    return whole ? grammar_.token(*id) : grammar_.literal(text);
  }

  Grammar::Expr call(const std::string& name, Grammar::Expr arguments) {
    const auto text = [&](std::string_view t) { return grammar_.literal(t); };
    switch (spec_.tool_format) {
      case ToolFormat::deepseek_v3:
        return grammar_.sequence({mark("<｜tool▁call▁begin｜>"), text("function"), mark("<｜tool▁sep｜>"), text(name + "\n```json\n"),
                                  arguments, text("\n```"), mark("<｜tool▁call▁end｜>")});
      case ToolFormat::deepseek_v31:
        return grammar_.sequence(
            {mark("<｜tool▁call▁begin｜>"), text(name), mark("<｜tool▁sep｜>"), arguments, mark("<｜tool▁call▁end｜>")});
      case ToolFormat::hermes:
        return grammar_.sequence(
            {mark("<tool_call>"), text("\n{\"name\": \"" + name + "\", \"arguments\": "), arguments, text("}\n"), mark("</tool_call>")});
      case ToolFormat::llama3: return grammar_.sequence({text("{\"name\": \"" + name + "\", \"parameters\": "), arguments, text("}")});
      default: fail("tool_choice: a call cannot be forced in the format {}; use \"auto\"", name_of(spec_.tool_format));
    }
  }

  Grammar::Expr all(Grammar::Expr one, int max_calls) {
    switch (spec_.tool_format) {
      case ToolFormat::deepseek_v3:
        return grammar_.sequence({mark("<｜tool▁calls▁begin｜>"), one,
                                  grammar_.repeat(grammar_.sequence({grammar_.literal("\n"), one}), 0, max_calls - 1),
                                  mark("<｜tool▁calls▁end｜>")});
      case ToolFormat::deepseek_v31:
        return grammar_.sequence({mark("<｜tool▁calls▁begin｜>"), grammar_.repeat(one, 1, max_calls), mark("<｜tool▁calls▁end｜>")});
      case ToolFormat::hermes:
        return grammar_.sequence({one, grammar_.repeat(grammar_.sequence({grammar_.literal("\n"), one}), 0, max_calls - 1)});
      default: return one;
    }
  }

  const Tokenizer& tokenizer_;
  const ConstraintSpec& spec_;
  Grammar grammar_;
};

}  // namespace

ConstraintFactory make_constraints(const Tokenizer& tokenizer, std::vector<int> eos_ids) {
  std::vector<std::string> bytes;
  bytes.reserve(static_cast<size_t>(tokenizer.size()));
  for (int id = 0; id < tokenizer.size(); ++id) bytes.emplace_back(tokenizer.is_special(id) ? std::string_view() : tokenizer.piece(id));
  auto compiler = std::make_shared<GrammarCompiler>(std::move(bytes), std::move(eos_ids));
  compiler->warm_up();
  const int end_token = tokenizer.token_id(kReasoningEnd).value_or(-1);
  return [compiler, end_token, &tokenizer](const ConstraintSpec& spec, bool after_reasoning) -> ConstraintMaker {
    ConstraintOptions options;
    if (after_reasoning) options = {std::string(kReasoningEnd), end_token};
    const bool calls = spec.kind == ConstraintSpec::Kind::calls;
    const auto grammar = calls ? compiler->compile(CallGrammar(tokenizer, spec).build()) : compiler->compile(source_of(spec));
    return [grammar, options] { return GrammarCompiler::constraint(grammar, options); };
  };
}

}  // namespace cachalot::server
