// Implementation of the template evaluator: a walk over the tree, every step and every nesting counted.
#include "text/jinja_eval.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "text/jinja_builtins.h"
#include "text/jinja_text.h"

namespace cachalot::jinja {

// Names visible in one block; a macro keeps the scope it was defined in.
struct Scope {
  Scope* parent = nullptr;
  std::vector<std::pair<const std::string*, Value>> names{};  // the strings live in the template
  bool captured = false;                                      // a macro refers to it, so it lives until the render ends
};

namespace {

enum class Flow : uint8_t { kNext, kBreak, kContinue };

class Evaluator {
 public:
  Evaluator(Runtime& runtime, const std::vector<std::pair<std::string, Value>>& variables) : runtime_(runtime) {
    for (const auto& [name, value] : variables) globals_.names.emplace_back(&name, value);
  }

  std::string run(const Body& body) {
    Scope top{&globals_};
    scope_ = &top;
    std::string out;
    out_ = &out;
    execute(body);
    return out;
  }

 private:
  // A scope for the time of a block. Captured ones are kept, their addresses unchanged, until the evaluator goes.
  class InScope {
   public:
    InScope(Evaluator& evaluator, Scope* parent) : evaluator_(evaluator), before_(evaluator.scope_), scope_(std::make_unique<Scope>()) {
      scope_->parent = parent;
      evaluator_.scope_ = scope_.get();
    }
    InScope(const InScope&) = delete;
    InScope& operator=(const InScope&) = delete;
    ~InScope() {
      evaluator_.scope_ = before_;
      if (scope_->captured) evaluator_.kept_.push_back(std::move(scope_));
    }
    // For the next turn of a loop: as new.
    void renew() {
      if (!scope_->captured) {
        scope_->names.clear();
        return;
      }
      Scope* parent = scope_->parent;
      evaluator_.kept_.push_back(std::move(scope_));
      scope_ = std::make_unique<Scope>();
      scope_->parent = parent;
      evaluator_.scope_ = scope_.get();
    }

   private:
    Evaluator& evaluator_;
    Scope* before_;
    std::unique_ptr<Scope> scope_;
  };

  // Sends output to a string of its own.
  class Capture {
   public:
    explicit Capture(Evaluator& evaluator) : evaluator_(evaluator), before_(evaluator.out_) { evaluator_.out_ = &text_; }
    Capture(const Capture&) = delete;
    Capture& operator=(const Capture&) = delete;
    ~Capture() { finish(); }
    std::string take() {
      finish();
      return std::move(text_);
    }

   private:
    void finish() {
      if (before_ == nullptr) return;
      evaluator_.out_ = before_;
      evaluator_.runtime_.captured(text_.size());
      before_ = nullptr;
    }
    Evaluator& evaluator_;
    std::string* before_;
    std::string text_;
  };

  // --- names ---
  Value lookup(const Expr& expr) {
    for (const Scope* scope = scope_; scope != nullptr; scope = scope->parent) {
      runtime_.step();
      for (const auto& [name, value] : scope->names) {
        if (*name == expr.name) return value;
      }
    }
    if (is_global(expr.name)) return runtime_.global(expr.name);
    return Undefined{&expr.name};
  }
  void assign(const std::string& name, Value value) {
    for (auto& [known, old] : scope_->names) {
      if (*known == name) {
        old = std::move(value);
        return;
      }
    }
    scope_->names.emplace_back(&name, std::move(value));
  }
  void assign(const Target& target, const Value& value) {
    runtime_.at(target.line);
    if (!target.parts.empty()) {
      const auto items = iterate(runtime_, value);
      if (items->items.size() != target.parts.size()) {
        runtime_.fail("found {} values to unpack, expected {}", items->items.size(), target.parts.size());
      }
      for (size_t i = 0; i < target.parts.size(); ++i) assign(target.parts[i], items->items[i]);
      return;
    }
    if (target.attribute.empty()) return assign(target.name, value);
    Expr name{Expr::Kind::kName, target.line};
    name.name = target.name;
    const Value holder = lookup(name);
    if (!holder.is_namespace()) {
      runtime_.fail("cannot set '{}.{}': found {}, expected a namespace", target.name, target.attribute, holder.type_name());
    }
    if (target.attribute.starts_with('_')) runtime_.fail("found the name '{}', expected no leading underscore", target.attribute);
    auto& attributes = holder.name_space().attributes;
    const auto at = std::find_if(attributes.begin(), attributes.end(), [&](const auto& entry) { return entry.first == target.attribute; });
    if (at != attributes.end())
      at->second = value;
    else
      attributes.emplace_back(target.attribute, value);
  }

  // --- statements ---
  Flow execute(const Body& body) {
    const Runtime::Nested nested(runtime_);
    for (const auto& statement : body) {
      const Flow flow = execute(*statement);
      if (flow != Flow::kNext) return flow;
    }
    return Flow::kNext;
  }
  void print(const Value& value) {
    if (value.is_string())
      runtime_.write(*out_, value.text());
    else
      runtime_.write(*out_, to_text(runtime_, value));
  }
  Flow execute(const Statement& statement) {
    runtime_.at(statement.line);
    runtime_.step();
    switch (statement.kind) {
      case Statement::Kind::kText: runtime_.write(*out_, statement.text); break;
      case Statement::Kind::kOutput: print(eval(*statement.expr)); break;
      case Statement::Kind::kIf: return execute_if(statement);
      case Statement::Kind::kFor: return execute_for(statement);
      case Statement::Kind::kSet: assign(statement.target, eval(*statement.expr)); break;
      case Statement::Kind::kSetBlock: return execute_set_block(statement);
      case Statement::Kind::kMacro: assign(statement.macro.name, macro_value(statement.macro)); break;
      case Statement::Kind::kCall: execute_call(statement); break;
      case Statement::Kind::kFilter: return execute_filter(statement);
      case Statement::Kind::kWith: return execute_with(statement);
      case Statement::Kind::kGeneration: {
        const InScope inner(*this, scope_);
        return execute(statement.body);
      }
      case Statement::Kind::kBreak: return Flow::kBreak;
      case Statement::Kind::kContinue: return Flow::kContinue;
    }
    return Flow::kNext;
  }
  Flow execute_if(const Statement& statement) {
    for (const Statement::Branch& branch : statement.branches) {
      if (!branch.condition || eval(*branch.condition).truthy()) return execute(branch.body);
    }
    return Flow::kNext;
  }
  Flow execute_for(const Statement& statement) {
    static const std::string kLoop = "loop";
    auto items = iterate(runtime_, eval(*statement.expr));
    Scope* const outer = scope_;
    if (statement.condition) {
      std::vector<Value> kept;
      InScope inner(*this, outer);
      for (const Value& item : items->items) {
        runtime_.step();
        inner.renew();
        assign(statement.target, item);
        if (eval(*statement.condition).truthy()) kept.push_back(item);
      }
      items = runtime_.list(std::move(kept)).sequence();
    }
    const Value loop = runtime_.loop(items);
    bool finished_a_turn = false;  // jinja runs the else part when none did, also after a break or continue
    InScope inner(*this, outer);
    for (size_t i = 0; i < items->items.size(); ++i) {
      runtime_.step();
      inner.renew();
      loop.loop().index = i;
      assign(kLoop, loop);
      assign(statement.target, items->items[i]);
      const Flow flow = execute(statement.body);
      if (flow == Flow::kBreak) break;
      finished_a_turn = finished_a_turn || flow == Flow::kNext;
    }
    if (finished_a_turn) return Flow::kNext;
    inner.renew();
    return execute(statement.otherwise);
  }
  Flow execute_set_block(const Statement& statement) {
    Capture capture(*this);
    Flow flow = Flow::kNext;
    {
      const InScope inner(*this, scope_);
      flow = execute(statement.body);
    }
    Value text = runtime_.string(capture.take());
    if (statement.expr) text = apply_filters(*statement.expr, text);
    assign(statement.target, text);
    return flow;
  }
  Flow execute_filter(const Statement& statement) {
    Capture capture(*this);
    Flow flow = Flow::kNext;
    {
      const InScope inner(*this, scope_);
      flow = execute(statement.body);
    }
    print(apply_filters(*statement.expr, runtime_.string(capture.take())));
    return flow;
  }
  Flow execute_with(const Statement& statement) {
    std::vector<Value> values;
    for (const auto& binding : statement.bindings) values.push_back(eval(*binding.second));
    const InScope inner(*this, scope_);
    for (size_t i = 0; i < values.size(); ++i) assign(statement.bindings[i].first, values[i]);
    return execute(statement.body);
  }
  Value macro_value(const MacroNode& macro) {
    constexpr size_t kScopeBytes = 256;  // about what a kept scope takes
    runtime_.room(kept_.size() + 1, kScopeBytes);
    for (Scope* scope = scope_; scope != nullptr && !scope->captured; scope = scope->parent) scope->captured = true;
    return runtime_.macro(&macro, macro.name, scope_);
  }
  void execute_call(const Statement& statement) {
    const Expr& call_expr = *statement.expr;
    const Value callee = eval(*call_expr.children[0]);
    Args args = arguments(call_expr.args);
    args.keyword.emplace_back("caller", macro_value(statement.macro));
    runtime_.at(statement.line);
    print(call(callee, args, call_expr.line));
  }

  Value call_macro(const CallableObject& callable, const Args& args) {
    static const std::string kCaller = "caller", kVarargs = "varargs", kKwargs = "kwargs";
    const MacroNode& macro = *callable.macro;
    const Runtime::Nested nested(runtime_);
    const InScope inner(*this, callable.scope);
    const size_t n = macro.parameters.size();
    std::vector<bool> given(n, false);
    for (size_t i = 0; i < std::min(n, args.positional.size()); ++i) {
      assign(macro.parameters[i], args.positional[i]);
      given[i] = true;
    }
    if (args.positional.size() > n && !macro.uses_varargs) {
      runtime_.fail("macro '{}': found {} arguments, expected at most {}", macro.name, args.positional.size(), n);
    }
    if (macro.uses_varargs) {
      const auto rest = args.positional.begin() + static_cast<std::ptrdiff_t>(std::min(n, args.positional.size()));
      assign(kVarargs, runtime_.tuple({rest, args.positional.end()}));
    }
    std::vector<std::pair<Value, Value>> named;
    for (const auto& [name, value] : args.keyword) {
      const auto at = std::find(macro.parameters.begin(), macro.parameters.end(), name);
      const auto i = static_cast<size_t>(at - macro.parameters.begin());
      if (i < n && !given[i]) {
        assign(macro.parameters[i], value);
        given[i] = true;
      } else if (name == kCaller && macro.uses_caller) {
        assign(kCaller, value);
      } else if (i == n && macro.uses_kwargs) {
        named.emplace_back(runtime_.string(name), value);
      } else {
        runtime_.fail("macro '{}': found an argument named '{}', expected none of that name", macro.name, printable(name));
      }
    }
    if (macro.uses_kwargs) assign(kKwargs, runtime_.dict(std::move(named)));
    for (size_t i = 0; i < n; ++i) {
      if (given[i]) continue;
      const size_t without_default = n - macro.defaults.size();
      assign(macro.parameters[i],
             i < without_default ? Value(Undefined{&macro.parameters[i]}) : eval(*macro.defaults[i - without_default]));
    }
    Capture capture(*this);
    execute(macro.body);
    return runtime_.string(capture.take());
  }

  // --- expressions ---
  Value eval(const Expr& expr) {
    const Runtime::Nested nested(runtime_);
    runtime_.at(expr.line);
    runtime_.step();
    switch (expr.kind) {
      case Expr::Kind::kConst: return expr.value;
      case Expr::Kind::kName: return lookup(expr);
      case Expr::Kind::kList: return runtime_.list(children(expr));
      case Expr::Kind::kTuple: return runtime_.tuple(children(expr));
      case Expr::Kind::kDict: return eval_dict(expr);
      case Expr::Kind::kAttribute: return eval_attribute(expr);
      case Expr::Kind::kItem: return eval_item(expr);
      case Expr::Kind::kSlice: return eval_slice(expr);
      case Expr::Kind::kCall: return eval_call(expr);
      case Expr::Kind::kFilter: return eval_filter(expr);
      case Expr::Kind::kTest: return eval_test(expr);
      case Expr::Kind::kUnary: return eval_unary(expr);
      case Expr::Kind::kBinary: return eval_binary(expr);
      case Expr::Kind::kConcat: return eval_concat(expr);
      case Expr::Kind::kCompare: return eval_compare(expr);
      case Expr::Kind::kAnd:
      case Expr::Kind::kOr: return eval_logic(expr);
      case Expr::Kind::kIf: return eval_if(expr);
    }
    return Undefined{};
  }
  std::vector<Value> children(const Expr& expr) {
    std::vector<Value> values;
    for (const ExprPtr& child : expr.children) values.push_back(eval(*child));
    return values;
  }
  Value eval_dict(const Expr& expr) {
    std::vector<std::pair<Value, Value>> entries;
    for (size_t i = 0; i < expr.children.size(); i += 2) {
      Value key = eval(*expr.children[i]);
      if (key.is_dict() || key.is_sequence(SequenceKind::kList)) runtime_.fail("found {} as a key, expected a string", key.type_name());
      Value value = eval(*expr.children[i + 1]);
      runtime_.step(1 + entries.size() / 4);
      const auto same = std::find_if(entries.begin(), entries.end(), [&](const auto& entry) { return equal(runtime_, entry.first, key); });
      if (same != entries.end())
        same->second = std::move(value);
      else
        entries.emplace_back(std::move(key), std::move(value));
    }
    return runtime_.dict(std::move(entries));
  }
  Value eval_attribute(const Expr& expr) {
    const Value object = eval(*expr.children[0]);
    runtime_.at(expr.line);
    return get_attribute(runtime_, object, expr.name);
  }
  Value eval_item(const Expr& expr) {
    const Value object = eval(*expr.children[0]), key = eval(*expr.children[1]);
    runtime_.at(expr.line);
    Value found = get_item(runtime_, object, key);
    const bool names_it = found.is_undefined() && expr.children[1]->kind == Expr::Kind::kConst && key.is_string();
    return names_it ? Value(Undefined{&expr.children[1]->value.text()}) : found;
  }
  Value eval_slice(const Expr& expr) {
    const Value object = eval(*expr.children[0]);
    Value bounds[3] = {None{}, None{}, None{}};
    for (size_t i = 0; i < 3; ++i) {
      if (expr.children[i + 1]) bounds[i] = eval(*expr.children[i + 1]);
    }
    runtime_.at(expr.line);
    return get_slice(runtime_, object, bounds[0], bounds[1], bounds[2]);
  }
  Args arguments(const CallArgs& call) {
    Args args;
    for (const ExprPtr& expr : call.positional) args.positional.push_back(eval(*expr));
    for (const auto& [name, expr] : call.keyword) args.keyword.emplace_back(name, eval(*expr));
    if (call.spread) {
      const auto items = iterate(runtime_, eval(*call.spread));
      runtime_.room(items->items.size(), sizeof(Value));
      args.positional.insert(args.positional.end(), items->items.begin(), items->items.end());
    }
    if (call.spread_keywords) {
      const Value named = eval(*call.spread_keywords);
      if (!named.is_dict()) runtime_.fail("found {} after '**', expected a dict", named.type_name());
      for (const auto& [key, value] : named.dict().entries) {
        if (!key.is_string()) runtime_.fail("found {} as the name of an argument, expected a string", key.type_name());
        args.keyword.emplace_back(key.text(), value);
      }
    }
    return args;
  }
  Value eval_call(const Expr& expr) {
    const Value callee = eval(*expr.children[0]);
    const Args args = arguments(expr.args);
    return call(callee, args, expr.line);
  }
  Value call(const Value& callee, const Args& args, int line) {
    runtime_.at(line);
    if (callee.is_undefined()) {
      const std::string* name = callee.undefined().name;
      runtime_.fail("'{}' is undefined or not allowed, so it cannot be called", name != nullptr ? printable(*name) : "value");
    }
    if (!callee.is_callable()) runtime_.fail("found {}, expected a function to call", callee.type_name());
    const CallableObject& callable = callee.callable();
    if (callable.kind == CallableObject::Kind::kGlobal) return call_global(runtime_, callable.name, args);
    if (callable.kind == CallableObject::Kind::kMethod) return call_method(runtime_, callable, args);
    return call_macro(callable, args);
  }
  Value eval_filter(const Expr& expr) {
    const Value value = eval(*expr.children[0]);
    const Args args = arguments(expr.args);
    runtime_.at(expr.line);
    return call_filter(runtime_, expr.name, value, args);
  }
  // The filters of a block: the innermost has no child and takes the block's text.
  Value apply_filters(const Expr& expr, const Value& text) {
    const Runtime::Nested nested(runtime_);
    const Value value = expr.children.empty() ? text : apply_filters(*expr.children[0], text);
    const Args args = arguments(expr.args);
    runtime_.at(expr.line);
    return call_filter(runtime_, expr.name, value, args);
  }
  Value eval_test(const Expr& expr) {
    const Value value = eval(*expr.children[0]);
    const Args args = arguments(expr.args);
    runtime_.at(expr.line);
    return call_test(runtime_, expr.name, value, args);
  }
  Value eval_unary(const Expr& expr) {
    const Value value = eval(*expr.children[0]);
    runtime_.at(expr.line);
    if (expr.name == "not") return !value.truthy();
    if (value.is_int()) return expr.name == "-" ? -value.integer() : value.integer();
    if (value.is_float()) return expr.name == "-" ? -value.number() : value.number();
    refuse_undefined(value);
    runtime_.fail("found {} after '{}', expected a number", value.type_name(), expr.name);
  }
  void refuse_undefined(const Value& value) const {
    if (!value.is_undefined()) return;
    const std::string* name = value.undefined().name;
    runtime_.fail("'{}' is undefined", name != nullptr ? printable(*name) : "value");
  }
  Value eval_binary(const Expr& expr) {
    const Value a = eval(*expr.children[0]), b = eval(*expr.children[1]);
    runtime_.at(expr.line);
    refuse_undefined(a);
    if (expr.name == "%" && a.is_string()) return percent_format(runtime_, a.text(), b);
    refuse_undefined(b);
    if (expr.name == "+") return add(runtime_, a, b);
    if (expr.name == "*") {
      if (b.is_int() && !a.is_number()) return repeat(runtime_, a, b.integer());
      if (a.is_int() && !b.is_number()) return repeat(runtime_, b, a.integer());
    }
    if (!a.is_number() || !b.is_number()) {
      runtime_.fail("found {} and {} around '{}', expected numbers", a.type_name(), b.type_name(), expr.name);
    }
    return expr.name == "**" ? power(a, b) : arithmetic(expr.name, a, b);
  }
  Value arithmetic(const std::string& op, const Value& a, const Value& b) const {
    const bool whole = a.is_int() && b.is_int();
    if ((op == "/" || op == "//" || op == "%") && b.number() == 0) runtime_.fail("division by zero");
    if (whole && op != "/") {
      const Int x = a.integer(), y = b.integer();
      if (op == "-") return runtime_.integer(x - y);
      if (op == "*") {
        Int product = 0;
        if (__builtin_mul_overflow(x, y, &product)) runtime_.fail("integer is larger than 2^100");
        return runtime_.integer(product);
      }
      Int quotient = x / y, rest = x % y;
      if (rest != 0 && (rest < 0) != (y < 0)) {  // Python rounds towards minus infinity
        --quotient;
        rest += y;
      }
      return op == "//" ? quotient : rest;
    }
    const double x = a.number(), y = b.number();
    if (op == "-") return x - y;
    if (op == "*") return x * y;
    if (op == "/") return x / y;
    double rest = std::fmod(x, y);
    if (rest != 0 && (rest < 0) != (y < 0)) rest += y;
    return op == "%" ? rest : std::floor((x - rest) / y + 0.5);
  }
  Value power(const Value& a, const Value& b) const {
    if (a.is_int() && b.is_int() && b.integer() >= 0) {
      Int result = 1;
      const Int base = a.integer();
      if (base == 0 || base == 1 || base == -1) return b.integer() == 0 ? 1 : base == -1 && b.integer() % 2 == 0 ? Int{1} : base;
      for (Int i = 0; i < b.integer(); ++i) {
        if (__builtin_mul_overflow(result, base, &result)) runtime_.fail("integer is larger than 2^100");
        result = runtime_.integer(result).integer();
      }
      return result;
    }
    if (a.number() == 0 && b.number() < 0) runtime_.fail("division by zero");
    const double result = std::pow(a.number(), b.number());
    if (std::isnan(result) && !std::isnan(a.number()) && !std::isnan(b.number())) runtime_.fail("found a root of a negative number");
    return result;
  }
  Value eval_concat(const Expr& expr) {
    std::string text;
    for (const ExprPtr& child : expr.children) {
      text += to_text(runtime_, eval(*child));
      runtime_.room(text.size());
    }
    return runtime_.string(std::move(text));
  }
  Value eval_compare(const Expr& expr) {
    Value left = eval(*expr.children[0]);
    for (size_t i = 0; i < expr.operators.size(); ++i) {
      Value right = eval(*expr.children[i + 1]);
      runtime_.at(expr.line);
      if (!holds(expr.operators[i], left, right)) return false;
      left = std::move(right);
    }
    return true;
  }
  bool holds(const std::string& op, const Value& a, const Value& b) {
    if (op == "==") return equal(runtime_, a, b);
    if (op == "!=") return !equal(runtime_, a, b);
    if (op == "in") return contains(runtime_, b, a);
    if (op == "not in") return !contains(runtime_, b, a);
    if ((a.is_float() && std::isnan(a.number())) || (b.is_float() && std::isnan(b.number()))) return false;
    const int order = compare(runtime_, a, b);
    return op == "<" ? order < 0 : op == "<=" ? order <= 0 : op == ">" ? order > 0 : order >= 0;
  }
  Value eval_logic(const Expr& expr) {
    Value left = eval(*expr.children[0]);
    const bool decided = expr.kind == Expr::Kind::kAnd ? !left.truthy() : left.truthy();
    return decided ? left : eval(*expr.children[1]);
  }
  Value eval_if(const Expr& expr) {
    if (eval(*expr.children[1]).truthy()) return eval(*expr.children[0]);
    return expr.children[2] ? eval(*expr.children[2]) : Value(Undefined{});
  }

  Runtime& runtime_;
  Scope globals_;
  Scope* scope_ = nullptr;
  std::string* out_ = nullptr;
  std::vector<std::unique_ptr<Scope>> kept_;
};

}  // namespace

Value add(Runtime& runtime, const Value& a, const Value& b) {
  if (a.is_string() && b.is_string()) {
    runtime.room(a.text().size() + b.text().size());
    if (a.is_markup() || b.is_markup()) {
      runtime.room(a.text().size() + b.text().size(), 5);
      return runtime.string((a.is_markup() ? a.text() : escape_html(a.text())) + (b.is_markup() ? b.text() : escape_html(b.text())), true);
    }
    std::string text;
    text.reserve(a.text().size() + b.text().size());
    text += a.text();
    return runtime.string(text += b.text());
  }
  if (a.is_int() && b.is_int()) return runtime.integer(a.integer() + b.integer());
  if (a.is_number() && b.is_number()) return a.number() + b.number();
  const bool lists = a.is_sequence(SequenceKind::kList) && b.is_sequence(SequenceKind::kList);
  if (lists || (a.is_sequence(SequenceKind::kTuple) && b.is_sequence(SequenceKind::kTuple))) {
    runtime.room(a.items().size() + b.items().size(), sizeof(Value));
    std::vector<Value> items = a.items();
    items.insert(items.end(), b.items().begin(), b.items().end());
    return runtime.sequence(a.sequence()->kind, std::move(items));
  }
  runtime.fail("cannot add {} and {}", a.type_name(), b.type_name());
}

Value repeat(Runtime& runtime, const Value& value, Int times) {
  const auto n = static_cast<size_t>(std::clamp<Int>(times, 0, static_cast<Int>(1) << 40));
  if (value.is_string()) {
    runtime.room(n, value.text().size());
    std::string text;
    text.reserve(n * value.text().size());
    for (size_t i = 0; i < n && !value.text().empty(); ++i) text += value.text();
    return runtime.string(std::move(text));
  }
  if (!value.is_sequence(SequenceKind::kList) && !value.is_sequence(SequenceKind::kTuple)) {
    runtime.fail("cannot multiply {} and an integer", value.type_name());
  }
  runtime.room(n, value.items().size() * sizeof(Value));
  std::vector<Value> items;
  for (size_t i = 0; i < n && !value.items().empty(); ++i) items.insert(items.end(), value.items().begin(), value.items().end());
  return runtime.sequence(value.sequence()->kind, std::move(items));
}

std::string evaluate(const Body& body, Runtime& runtime, std::vector<std::pair<std::string, Value>> variables) {
  return Evaluator(runtime, variables).run(body);
}

}  // namespace cachalot::jinja
