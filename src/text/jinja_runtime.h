// Runtime: the budget of one render and the only maker of values, so that nothing is built that was not paid for.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <ctime>
#include <deque>
#include <initializer_list>
#include <optional>

#include "base/error.h"
#include "text/jinja_limits.h"
#include "text/jinja_value.h"

namespace cachalot::jinja {

class Runtime {
 public:
  Runtime(const std::string& name, const TemplateLimits& limits, const std::tm& now);

  // The line that errors from now on are reported at.
  void at(int line) { line_ = line; }
  template <typename... A>
  [[noreturn]] void fail(fmt::format_string<A...> format, A&&... args) const {
    fail_text(fmt::format(format, std::forward<A>(args)...));
  }
  [[noreturn]] void fail_text(const std::string& text) const;

  // Costs. Each throws Error naming the limit passed.
  void step(size_t n = 1) {
    steps_ += n;
    if (steps_ >= next_check_) check_steps();
  }
  void scan(size_t bytes) { step(1 + bytes / 64); }
  void room(size_t bytes) const;  // these bytes of values would still fit
  void room(size_t count, size_t each) const;
  void write(std::string& out, std::string_view text);  // appends to output or to the text of a block being captured
  void captured(size_t bytes) { written_ -= bytes; }    // a captured text has become a value

  [[nodiscard]] Value string(std::string text, bool markup = false);
  [[nodiscard]] Value string(std::string_view text) { return string(std::string(text)); }
  [[nodiscard]] Value string(const char* text) { return string(std::string(text)); }
  [[nodiscard]] Value sequence(SequenceKind kind, std::vector<Value> items);
  [[nodiscard]] Value list(std::vector<Value> items) { return sequence(SequenceKind::kList, std::move(items)); }
  [[nodiscard]] Value tuple(std::vector<Value> items) { return sequence(SequenceKind::kTuple, std::move(items)); }
  [[nodiscard]] Value dict(std::vector<std::pair<Value, Value>> entries);
  [[nodiscard]] Value iterator(std::vector<Value> items);
  [[nodiscard]] Value loop(std::shared_ptr<const SequenceObject> items);
  [[nodiscard]] Value method(std::string name, Value self);
  [[nodiscard]] Value global(std::string name);
  [[nodiscard]] Value macro(const MacroNode* macro, std::string name, Scope* scope);
  [[nodiscard]] Value integer(Int value) const;  // Error when too large
  [[nodiscard]] NamespaceObject* name_space();

  [[nodiscard]] const TemplateLimits& limits() const { return limits_; }
  [[nodiscard]] const std::tm& now() const { return now_; }

  // Held while something is evaluated inside something else.
  class Nested {
   public:
    explicit Nested(Runtime& runtime) : runtime_(runtime) {
      if (++runtime_.depth_ > runtime_.limits_.max_eval_depth) runtime_.too_deep();
    }
    Nested(const Nested&) = delete;
    Nested& operator=(const Nested&) = delete;
    ~Nested() { --runtime_.depth_; }

   private:
    Runtime& runtime_;
  };

 private:
  void check_steps();
  Value callable(CallableObject::Kind kind, std::string name, Value self, const MacroNode* macro, Scope* scope);
  [[noreturn]] void too_deep();
  int depth_of(const std::vector<Value>& items) const;

  size_t live_ = 0;  // first, since every value's Charge points here
  const std::string& name_;
  const TemplateLimits& limits_;
  const std::tm now_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  int line_ = 0;
  int depth_ = 0;
  size_t steps_ = 0, next_check_ = 0, written_ = 0;
  std::deque<NamespaceObject> namespaces_;
  std::deque<Charge> namespace_charges_;
};

// Reads the arguments of one call by position or name, as a Python signature would: names[i] is the i-th parameter.
class ArgReader {
 public:
  ArgReader(Runtime& runtime, std::string_view callee, const Args& args, std::initializer_list<std::string_view> names,
            size_t required = 0);
  // The i-th argument, or null when it was left out.
  [[nodiscard]] const Value* get(size_t i) const { return found_[i]; }
  [[nodiscard]] Value value(size_t i, Value fallback) const { return found_[i] != nullptr ? *found_[i] : std::move(fallback); }
  [[nodiscard]] bool flag(size_t i, bool fallback) const { return found_[i] != nullptr ? found_[i]->truthy() : fallback; }
  [[nodiscard]] const std::string& text(size_t i) const;  // Error unless a string was given
  [[nodiscard]] int64_t integer(size_t i, int64_t fallback) const;

 private:
  Runtime& runtime_;
  std::string callee_;
  std::vector<std::string> names_;
  std::vector<const Value*> found_;
};

}  // namespace cachalot::jinja
