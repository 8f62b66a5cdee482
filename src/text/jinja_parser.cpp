// Implementation of the template parser: recursive descent over the tokens, depth-limited.
#include "text/jinja_parser.h"

#include <algorithm>
#include <initializer_list>

#include "base/error.h"
#include "text/jinja_builtins.h"
#include "text/jinja_lexer.h"

namespace cachalot::jinja {
namespace {

// Left-leaning chains (a + b + c ..., x.y.z ...) make high trees without nesting in the source.
constexpr int kMaxHeight = 500;

class Parser {
 public:
  Parser(std::vector<Token> tokens, const std::string& name, const TemplateLimits& limits)
      : tokens_(std::move(tokens)), name_(name), limits_(limits) {}

  Body run() { return statements({}); }

 private:
  using Kind = Token::Kind;

  // --- tokens ---
  [[nodiscard]] const Token& current() const { return tokens_[at_]; }
  [[nodiscard]] const Token& ahead() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  const Token& take() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }
  [[nodiscard]] bool is_name(std::string_view text) const { return current().kind == Kind::kName && current().text == text; }
  [[nodiscard]] bool is_op(std::string_view text) const { return current().kind == Kind::kOperator && current().text == text; }
  bool skip_name(std::string_view text) { return is_name(text) && (take(), true); }
  bool skip_op(std::string_view text) { return is_op(text) && (take(), true); }
  void expect_op(std::string_view text) {
    if (!skip_op(text)) expected(fmt::format("'{}'", text));
  }
  std::string expect_name(std::string_view what) {
    if (current().kind != Kind::kName) expected(what);
    return take().text;
  }
  template <typename... A>
  [[noreturn]] void fail_at(int line, fmt::format_string<A...> format, A&&... args) const {
    fail("template {}, line {}: {}", name_, line, fmt::format(format, std::forward<A>(args)...));
  }
  [[noreturn]] void expected(std::string_view what) const { fail_at(current().line, "found {}, expected {}", describe(current()), what); }
  static std::string describe(const Token& token) {
    switch (token.kind) {
      case Kind::kText: return "text";
      case Kind::kOutputBegin: return "'{{'";
      case Kind::kOutputEnd: return "'}}'";
      case Kind::kTagBegin: return "'{%'";
      case Kind::kTagEnd: return "'%}'";
      case Kind::kString: return fmt::format("the string '{}'", printable(token.text, 40));
      case Kind::kInt:
      case Kind::kFloat: return "a number";
      case Kind::kEnd: return "the end of the template";
      default: return fmt::format("'{}'", printable(token.text, 40));
    }
  }

  class Nested {
   public:
    explicit Nested(Parser& parser) : parser_(parser) {
      if (parser_.depth_ >= parser_.limits_.max_nesting) {
        parser_.fail_at(parser_.current().line, "nested deeper than {} levels (max_nesting)", parser_.limits_.max_nesting);
      }
      ++parser_.depth_;
    }
    Nested(const Nested&) = delete;
    Nested& operator=(const Nested&) = delete;
    ~Nested() { --parser_.depth_; }

   private:
    Parser& parser_;
  };

  // --- expressions ---
  static ExprPtr make(Expr::Kind kind, int line, std::string name = {}) {
    auto expr = std::make_unique<Expr>();
    expr->kind = kind;
    expr->line = line;
    expr->name = std::move(name);
    return expr;
  }
  void adopt(Expr& parent, const Expr& child) {
    parent.height = std::max(parent.height, child.height + 1);
    if (parent.height > kMaxHeight) fail_at(parent.line, "an expression has more than {} operations inside one another", kMaxHeight);
  }
  void add_child(Expr& parent, ExprPtr child) {
    if (child) adopt(parent, *child);
    parent.children.push_back(std::move(child));
  }
  ExprPtr binary(Expr::Kind kind, std::string op, ExprPtr left, ExprPtr right, int line) {
    ExprPtr expr = make(kind, line, std::move(op));
    add_child(*expr, std::move(left));
    add_child(*expr, std::move(right));
    return expr;
  }

  ExprPtr expression() {
    const Nested nested(*this);
    ExprPtr value = or_expression();
    while (is_name("if")) {
      const int line = take().line;
      ++conditional_;
      ExprPtr choice = make(Expr::Kind::kIf, line);
      add_child(*choice, std::move(value));
      add_child(*choice, or_expression());
      add_child(*choice, skip_name("else") ? expression() : nullptr);
      --conditional_;
      value = std::move(choice);
    }
    return value;
  }
  ExprPtr or_expression() {
    ExprPtr left = and_expression();
    while (is_name("or")) {
      const int line = take().line;
      left = binary(Expr::Kind::kOr, {}, std::move(left), and_expression(), line);
    }
    return left;
  }
  ExprPtr and_expression() {
    ExprPtr left = not_expression();
    while (is_name("and")) {
      const int line = take().line;
      left = binary(Expr::Kind::kAnd, {}, std::move(left), not_expression(), line);
    }
    return left;
  }
  ExprPtr not_expression() {
    if (!is_name("not")) return comparison();
    const Nested nested(*this);
    ExprPtr expr = make(Expr::Kind::kUnary, take().line, "not");
    add_child(*expr, not_expression());
    return expr;
  }
  // The comparison operator here, taken; empty when there is none.
  std::string comparison_operator() {
    for (const char* op : {"==", "!=", "<=", ">=", "<", ">"}) {
      if (skip_op(op)) return op;
    }
    if (skip_name("in")) return "in";
    if (is_name("not") && ahead().kind == Kind::kName && ahead().text == "in") {
      take();
      take();
      return "not in";
    }
    return {};
  }
  ExprPtr comparison() {
    ExprPtr left = sum();
    ExprPtr chain;
    for (int line = current().line;; line = current().line) {
      std::string op = comparison_operator();
      if (op.empty()) break;
      if (!chain) {
        chain = make(Expr::Kind::kCompare, line);
        add_child(*chain, std::move(left));
      }
      chain->operators.push_back(std::move(op));
      add_child(*chain, sum());
    }
    return chain ? std::move(chain) : std::move(left);
  }
  ExprPtr sum() {
    ExprPtr left = concatenation();
    while (is_op("+") || is_op("-")) {
      const Token& op = take();
      left = binary(Expr::Kind::kBinary, op.text, std::move(left), concatenation(), op.line);
    }
    return left;
  }
  ExprPtr concatenation() {
    ExprPtr left = product();
    if (!is_op("~")) return left;
    ExprPtr all = make(Expr::Kind::kConcat, current().line);
    add_child(*all, std::move(left));
    while (skip_op("~")) add_child(*all, product());
    return all;
  }
  ExprPtr product() {
    ExprPtr left = power();
    while (is_op("*") || is_op("/") || is_op("//") || is_op("%")) {
      const Token& op = take();
      left = binary(Expr::Kind::kBinary, op.text, std::move(left), power(), op.line);
    }
    return left;
  }
  ExprPtr power() {
    ExprPtr left = unary(true);
    while (is_op("**")) {
      const int line = take().line;
      left = binary(Expr::Kind::kBinary, "**", std::move(left), unary(true), line);
    }
    return left;
  }
  ExprPtr unary(bool with_filters) {
    ExprPtr expr;
    if (is_op("-") || is_op("+")) {
      const Nested nested(*this);
      const Token& op = take();
      expr = make(Expr::Kind::kUnary, op.line, op.text);
      add_child(*expr, unary(false));
    } else {
      expr = primary();
    }
    expr = postfix(std::move(expr));
    return with_filters ? filters_and_tests(std::move(expr)) : std::move(expr);
  }

  ExprPtr primary() {
    const Token& token = current();
    if (token.kind == Kind::kName) {
      take();
      if (token.text == "true" || token.text == "True") return constant(token.line, true);
      if (token.text == "false" || token.text == "False") return constant(token.line, false);
      if (token.text == "none" || token.text == "None") return constant(token.line, None{});
      for (MacroNode* macro : macros_) {
        macro->uses_varargs |= token.text == "varargs";
        macro->uses_kwargs |= token.text == "kwargs";
        macro->uses_caller |= token.text == "caller";
      }
      return make(Expr::Kind::kName, token.line, token.text);
    }
    if (token.kind == Kind::kString) {
      std::string text = take().text;
      while (current().kind == Kind::kString) text += take().text;  // neighbours are joined
      return constant(token.line, std::shared_ptr<const StringObject>(new StringObject{std::move(text), false, {}}));
    }
    if (token.kind == Kind::kInt) return constant(token.line, take().integer);
    if (token.kind == Kind::kFloat) return constant(token.line, take().number);
    if (skip_op("(")) {
      ExprPtr inner = tuple(true, true, {});
      expect_op(")");
      return inner;
    }
    if (is_op("[")) return list();
    if (is_op("{")) return dict();
    expected("an expression");
  }
  static ExprPtr constant(int line, Value value) {
    ExprPtr expr = make(Expr::Kind::kConst, line);
    expr->value = std::move(value);
    return expr;
  }

  // One expression, or several with commas between them. `stop`: a name that ends it besides the usual marks.
  ExprPtr tuple(bool in_parentheses, bool with_condition, std::string_view stop) {
    const int line = current().line;
    std::vector<ExprPtr> items;
    bool has_comma = false;
    while (true) {
      const bool ends =
          current().kind == Kind::kOutputEnd || current().kind == Kind::kTagEnd || is_op(")") || (!stop.empty() && is_name(stop));
      if (ends) break;
      if (with_condition) {
        items.push_back(expression());
      } else {
        const Nested nested(*this);
        items.push_back(or_expression());
      }
      if (!skip_op(",")) break;
      has_comma = true;
    }
    if (!has_comma && !items.empty()) return std::move(items[0]);
    if (items.empty() && !in_parentheses) expected("an expression");
    ExprPtr expr = make(Expr::Kind::kTuple, line);
    for (ExprPtr& item : items) add_child(*expr, std::move(item));
    return expr;
  }
  ExprPtr list() {
    ExprPtr expr = make(Expr::Kind::kList, take().line);
    while (!is_op("]")) {
      add_child(*expr, expression());
      if (!skip_op(",")) break;
    }
    expect_op("]");
    return expr;
  }
  ExprPtr dict() {
    ExprPtr expr = make(Expr::Kind::kDict, take().line);
    while (!is_op("}")) {
      add_child(*expr, expression());
      expect_op(":");
      add_child(*expr, expression());
      if (!skip_op(",")) break;
    }
    expect_op("}");
    return expr;
  }

  ExprPtr postfix(ExprPtr expr) {
    while (true) {
      if (is_op(".")) {
        const int line = take().line;
        if (current().kind == Kind::kInt) {
          expr = binary(Expr::Kind::kItem, {}, std::move(expr), constant(line, take().integer), line);
        } else {
          ExprPtr attribute = make(Expr::Kind::kAttribute, line, expect_name("a name or a number after '.'"));
          add_child(*attribute, std::move(expr));
          expr = std::move(attribute);
        }
      } else if (is_op("[")) {
        expr = subscript(std::move(expr));
      } else if (is_op("(")) {
        expr = call(std::move(expr));
      } else {
        return expr;
      }
    }
  }
  ExprPtr subscript(ExprPtr object) {
    const int line = take().line;
    ExprPtr start;
    if (!is_op(":")) start = expression();
    if (!is_op(":")) {
      expect_op("]");
      return binary(Expr::Kind::kItem, {}, std::move(object), std::move(start), line);
    }
    ExprPtr slice = make(Expr::Kind::kSlice, line);
    add_child(*slice, std::move(object));
    add_child(*slice, std::move(start));
    for (int bound = 0; bound < 2; ++bound) {
      const bool present = skip_op(":") && !is_op(":") && !is_op("]");
      add_child(*slice, present ? expression() : nullptr);
    }
    expect_op("]");
    return slice;
  }
  CallArgs arguments(Expr& owner) {
    CallArgs args;
    const int line = current().line;
    expect_op("(");
    while (!is_op(")")) {
      if (skip_op("*")) {
        if (args.spread || args.spread_keywords) fail_at(line, "found a second '*' argument, expected one");
        args.spread = expression();
        adopt(owner, *args.spread);
      } else if (skip_op("**")) {
        if (args.spread_keywords) fail_at(line, "found a second '**' argument, expected one");
        args.spread_keywords = expression();
        adopt(owner, *args.spread_keywords);
      } else if (current().kind == Kind::kName && ahead().kind == Kind::kOperator && ahead().text == "=") {
        std::string name = take().text;
        take();
        args.keyword.emplace_back(std::move(name), expression());
        adopt(owner, *args.keyword.back().second);
      } else {
        if (args.spread || args.spread_keywords || !args.keyword.empty()) fail_at(line, "found a positional argument after a named one");
        args.positional.push_back(expression());
        adopt(owner, *args.positional.back());
      }
      if (!skip_op(",")) break;
    }
    expect_op(")");
    return args;
  }
  ExprPtr call(ExprPtr callee) {
    ExprPtr expr = make(Expr::Kind::kCall, current().line);
    add_child(*expr, std::move(callee));
    expr->args = arguments(*expr);
    return expr;
  }

  ExprPtr filters_and_tests(ExprPtr expr) {
    while (true) {
      if (is_op("|")) {
        expr = filter(std::move(expr));
      } else if (is_name("is")) {
        expr = test(std::move(expr));
      } else if (is_op("(")) {
        expr = call(std::move(expr));
      } else {
        return expr;
      }
    }
  }
  // At "|". A null `expr` makes the first filter of a filter block.
  ExprPtr filter(ExprPtr expr) {
    const int line = take().line;
    return filter_name(std::move(expr), line);
  }
  ExprPtr filter_name(ExprPtr expr, int line) {
    ExprPtr result = make(Expr::Kind::kFilter, line, expect_name("the name of a filter"));
    // A branch that is never taken may use what only other engines know; then the error comes when it is.
    if (conditional_ == 0 && !is_filter(result->name)) fail_at(line, "unknown filter '{}'", printable(result->name));
    if (expr) add_child(*result, std::move(expr));
    if (is_op("(")) result->args = arguments(*result);
    return result;
  }
  ExprPtr test(ExprPtr expr) {
    const int line = take().line;
    const bool negated = skip_name("not");
    ExprPtr result = make(Expr::Kind::kTest, line, expect_name("the name of a test"));
    if (conditional_ == 0 && !is_test(result->name)) fail_at(line, "unknown test '{}'", printable(result->name));
    add_child(*result, std::move(expr));
    const Kind next = current().kind;
    if (is_op("(")) {
      result->args = arguments(*result);
    } else if (next == Kind::kString || next == Kind::kInt || next == Kind::kFloat || is_op("[") || is_op("{") ||
               (next == Kind::kName && !is_name("else") && !is_name("or") && !is_name("and"))) {
      if (is_name("is")) fail_at(line, "found a second 'is', expected one test at a time");
      const Nested nested(*this);
      result->args.positional.push_back(postfix(primary()));
      adopt(*result, *result->args.positional.back());
    }
    if (!negated) return result;
    ExprPtr inverse = make(Expr::Kind::kUnary, line, "not");
    add_child(*inverse, std::move(result));
    return inverse;
  }

  // --- statements ---
  // Until a tag named in `ends`, which is left as the current token; all of the template when `ends` is empty.
  Body statements(std::initializer_list<std::string_view> ends) {
    const Nested nested(*this);
    Body body;
    while (true) {
      const Token& token = current();
      if (token.kind == Kind::kText) {
        body.push_back(statement(Statement::Kind::kText, token.line));
        body.back()->text = take().text;
      } else if (token.kind == Kind::kOutputBegin) {
        take();
        body.push_back(statement(Statement::Kind::kOutput, token.line));
        body.back()->expr = tuple(false, true, {});
        if (current().kind != Kind::kOutputEnd) expected("'}}'");
        take();
      } else if (token.kind == Kind::kTagBegin) {
        take();
        if (current().kind != Kind::kName) expected("the name of a tag");
        if (std::find(ends.begin(), ends.end(), current().text) != ends.end()) return body;
        body.push_back(tag(ends));
        end_tag();
      } else {
        if (ends.size() != 0) fail_at(token.line, "found the end of the template, expected '{}'", *(ends.end() - 1));
        return body;
      }
    }
  }
  static std::unique_ptr<Statement> statement(Statement::Kind kind, int line) {
    auto result = std::make_unique<Statement>();
    result->kind = kind;
    result->line = line;
    return result;
  }
  void end_tag() {
    if (current().kind != Kind::kTagEnd) expected("'%}'");
    take();
  }
  // The end of an opening tag and all up to the closing one, whose name is the current token afterwards.
  Body block(std::initializer_list<std::string_view> ends) {
    skip_op(":");
    end_tag();
    return statements(ends);
  }

  std::unique_ptr<Statement> tag(std::initializer_list<std::string_view> ends) {
    const int line = current().line;
    const std::string name = take().text;
    if (name == "if") return if_tag(line);
    if (name == "for") return for_tag(line);
    if (name == "set") return set_tag(line);
    if (name == "macro") return macro_tag(line);
    if (name == "call") return call_tag(line);
    if (name == "with") return with_tag(line);
    if (name == "filter") {
      auto result = statement(Statement::Kind::kFilter, line);
      result->expr = filter_name(nullptr, line);
      while (is_op("|")) result->expr = filter(std::move(result->expr));
      result->body = block({"endfilter"});
      take();
      return result;
    }
    if (name == "generation") {
      auto result = statement(Statement::Kind::kGeneration, line);
      result->body = function_body(nullptr, "endgeneration");
      take();
      return result;
    }
    if (name == "break" || name == "continue") {
      if (loops_ == 0) fail_at(line, "found '{}' outside a loop", name);
      return statement(name == "break" ? Statement::Kind::kBreak : Statement::Kind::kContinue, line);
    }
    if (ends.size() != 0)
      fail_at(line, "found the tag '{}', which is unknown or out of place: expected '{}'", printable(name), *(ends.end() - 1));
    fail_at(line, "found the tag '{}', which is unknown or out of place", printable(name));
  }

  std::unique_ptr<Statement> if_tag(int line) {
    auto result = statement(Statement::Kind::kIf, line);
    ++conditional_;
    for (bool more = true; more;) {
      result->branches.emplace_back();
      result->branches.back().condition = tuple(false, false, {});
      Body body = block({"elif", "else", "endif"});
      result->branches.back().body = std::move(body);
      const std::string next = take().text;
      more = next == "elif";
      if (next == "else") {
        result->branches.emplace_back();
        Body otherwise = block({"endif"});
        result->branches.back().body = std::move(otherwise);
        take();
      }
    }
    --conditional_;
    return result;
  }
  std::unique_ptr<Statement> for_tag(int line) {
    auto result = statement(Statement::Kind::kFor, line);
    result->target = target("in", false);
    if (!skip_name("in")) expected("'in'");
    result->expr = tuple(false, false, "recursive");
    if (skip_name("if")) result->condition = expression();
    if (is_name("recursive")) fail_at(line, "found a recursive loop, which is not supported");
    ++loops_;
    result->body = block({"else", "endfor"});
    --loops_;
    if (take().text == "else") {
      result->otherwise = block({"endfor"});
      take();
    }
    return result;
  }
  std::unique_ptr<Statement> set_tag(int line) {
    auto result = statement(Statement::Kind::kSet, line);
    result->target = target({}, true);
    if (skip_op("=")) {
      result->expr = tuple(false, true, {});
      return result;
    }
    result->kind = Statement::Kind::kSetBlock;
    while (is_op("|")) result->expr = filter(std::move(result->expr));
    result->body = block({"endset"});
    take();
    return result;
  }
  Target target(std::string_view stop, bool with_attribute) {
    Target first = single_target(with_attribute);
    if (!is_op(",")) return first;
    Target all{first.line, {}, {}, {}};
    all.parts.push_back(std::move(first));
    while (skip_op(",")) {
      if ((!stop.empty() && is_name(stop)) || is_op("=") || is_op(")")) break;
      all.parts.push_back(single_target(with_attribute));
    }
    return all;
  }
  Target single_target(bool with_attribute) {
    const int line = current().line;
    if (skip_op("(")) {
      const Nested nested(*this);
      Target inner = target({}, with_attribute);
      expect_op(")");
      return inner;
    }
    Target result{line, expect_name("a name to assign to"), {}, {}};
    for (const char* word : {"true", "false", "none", "True", "False", "None"}) {
      if (result.name == word) fail_at(line, "found '{}', expected a name to assign to", word);
    }
    if (with_attribute && skip_op(".")) result.attribute = expect_name("an attribute to assign to");
    return result;
  }
  void signature(MacroNode& macro) {
    expect_op("(");
    while (!is_op(")")) {
      macro.parameters.push_back(expect_name("the name of a parameter"));
      if (skip_op("=")) {
        macro.defaults.push_back(expression());
      } else if (!macro.defaults.empty()) {
        fail_at(current().line, "found a parameter without a default after one with a default");
      }
      if (!skip_op(",")) break;
    }
    expect_op(")");
  }
  // A body that is a function of its own: no break out of it. `macro` is null for a generation block.
  Body function_body(MacroNode* macro, std::string_view end) {
    const int loops = std::exchange(loops_, 0);
    if (macro != nullptr) macros_.push_back(macro);
    Body body = block({end});
    if (macro != nullptr) macros_.pop_back();
    loops_ = loops;
    return body;
  }
  std::unique_ptr<Statement> macro_tag(int line) {
    auto result = statement(Statement::Kind::kMacro, line);
    result->macro.name = expect_name("the name of a macro");
    signature(result->macro);
    result->macro.body = function_body(&result->macro, "endmacro");
    take();
    return result;
  }
  std::unique_ptr<Statement> call_tag(int line) {
    auto result = statement(Statement::Kind::kCall, line);
    result->macro.name = "caller";
    if (is_op("(")) signature(result->macro);
    result->expr = expression();
    if (result->expr->kind != Expr::Kind::kCall) fail_at(line, "found another expression, expected a call");
    result->macro.body = function_body(&result->macro, "endcall");
    take();
    return result;
  }
  std::unique_ptr<Statement> with_tag(int line) {
    auto result = statement(Statement::Kind::kWith, line);
    while (current().kind != Kind::kTagEnd) {
      Target name = target({}, false);
      expect_op("=");
      result->bindings.emplace_back(std::move(name), expression());
      if (!skip_op(",")) break;
    }
    result->body = block({"endwith"});
    take();
    return result;
  }

  const std::vector<Token> tokens_;
  const std::string& name_;
  const TemplateLimits& limits_;
  size_t at_ = 0;
  int depth_ = 0, conditional_ = 0, loops_ = 0;
  std::vector<MacroNode*> macros_;  // being parsed, outermost first
};

}  // namespace

Body parse(const std::string& source, const std::string& name, const TemplateLimits& limits) {
  return Parser(tokenize(source, name), name, limits).run();
}

}  // namespace cachalot::jinja
