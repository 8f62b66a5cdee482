// Implementation of the render budget and of argument binding.
#include "text/jinja_runtime.h"

#include <algorithm>

namespace cachalot::jinja {
namespace {

// Rough cost of a value beside its text: control block, object, and the Value that points to it.
constexpr size_t kObjectBytes = 96;
constexpr size_t kStepsBetweenClocks = 4096;

}  // namespace

Runtime::Runtime(const std::string& name, const TemplateLimits& limits, const std::tm& now) : name_(name), limits_(limits), now_(now) {
  next_check_ = std::min(kStepsBetweenClocks, limits_.max_steps + 1);
}

void Runtime::fail_text(const std::string& text) const { throw Error(fmt::format("template {}, line {}: {}", name_, line_, text)); }

void Runtime::check_steps() {
  if (steps_ > limits_.max_steps) fail("stopped at the limit of {} steps (max_steps)", limits_.max_steps);
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start_;
  if (spent.count() > limits_.max_seconds) fail("stopped at the limit of {} seconds (max_seconds)", limits_.max_seconds);
  next_check_ = std::min(steps_ + kStepsBetweenClocks, limits_.max_steps + 1);
}

void Runtime::too_deep() {
  --depth_;  // the guard that called is not yet alive, so its destructor will not run
  fail("evaluation is nested deeper than {} levels (max_eval_depth)", limits_.max_eval_depth);
}

void Runtime::room(size_t bytes) const {
  if (bytes > limits_.max_memory_bytes || live_ > limits_.max_memory_bytes - bytes) {
    fail("values would take more than {} bytes of memory (max_memory_bytes)", limits_.max_memory_bytes);
  }
}
void Runtime::room(size_t count, size_t each) const {
  size_t bytes = 0;
  room(__builtin_mul_overflow(count, each, &bytes) ? SIZE_MAX : bytes);
}

void Runtime::write(std::string& out, std::string_view text) {
  if (text.size() > limits_.max_output_bytes - std::min(limits_.max_output_bytes, written_)) {
    fail("output is longer than {} bytes (max_output_bytes)", limits_.max_output_bytes);
  }
  scan(text.size());
  written_ += text.size();
  out += text;
}

Value Runtime::string(std::string text, bool markup) {
  const size_t bytes = text.size() + kObjectBytes;
  room(bytes);
  scan(text.size());
  return std::shared_ptr<const StringObject>(new StringObject{std::move(text), markup, Charge(&live_, bytes)});
}

int Runtime::depth_of(const std::vector<Value>& items) const {
  int depth = 0;
  for (const Value& item : items) depth = std::max(depth, item.depth());
  if (depth >= limits_.max_nesting) fail("lists are nested deeper than {} levels (max_nesting)", limits_.max_nesting);
  return depth + 1;
}

Value Runtime::sequence(SequenceKind kind, std::vector<Value> items) {
  const size_t bytes = items.size() * sizeof(Value) + kObjectBytes;
  room(bytes);
  step(1 + items.size());
  const int depth = depth_of(items);
  return std::shared_ptr<const SequenceObject>(new SequenceObject{kind, std::move(items), depth, Charge(&live_, bytes)});
}

Value Runtime::iterator(std::vector<Value> items) {
  const size_t bytes = items.size() * sizeof(Value) + kObjectBytes;
  room(bytes);
  step(1 + items.size());
  const int depth = depth_of(items);
  return std::shared_ptr<IteratorObject>(new IteratorObject{std::move(items), 0, depth, Charge(&live_, bytes)});
}

Value Runtime::dict(std::vector<std::pair<Value, Value>> entries) {
  const size_t bytes = entries.size() * 2 * sizeof(Value) + kObjectBytes;
  room(bytes);
  step(1 + entries.size());
  int depth = 0;
  for (const auto& [key, value] : entries) depth = std::max({depth, key.depth(), value.depth()});
  if (depth >= limits_.max_nesting) fail("dicts are nested deeper than {} levels (max_nesting)", limits_.max_nesting);
  return std::shared_ptr<const DictObject>(new DictObject{std::move(entries), depth + 1, Charge(&live_, bytes)});
}

Value Runtime::loop(std::shared_ptr<const SequenceObject> items) {
  room(kObjectBytes);
  return std::shared_ptr<LoopObject>(new LoopObject{std::move(items), 0, Charge(&live_, kObjectBytes)});
}

Value Runtime::callable(CallableObject::Kind kind, std::string name, Value self, const MacroNode* macro, Scope* scope) {
  room(2 * kObjectBytes);
  step();
  if (self.depth() >= limits_.max_nesting) fail("values are nested deeper than {} levels (max_nesting)", limits_.max_nesting);
  return std::shared_ptr<const CallableObject>(
      new CallableObject{kind, std::move(name), std::move(self), macro, scope, Charge(&live_, 2 * kObjectBytes)});
}
Value Runtime::method(std::string name, Value self) {
  return callable(CallableObject::Kind::kMethod, std::move(name), std::move(self), nullptr, nullptr);
}
Value Runtime::global(std::string name) { return callable(CallableObject::Kind::kGlobal, std::move(name), None{}, nullptr, nullptr); }
Value Runtime::macro(const MacroNode* macro, std::string name, Scope* scope) {
  return callable(CallableObject::Kind::kMacro, std::move(name), None{}, macro, scope);
}

Value Runtime::integer(Int value) const {
  constexpr Int kLargest = static_cast<Int>(1) << 100;
  if (value > kLargest || value < -kLargest) fail("integer is larger than 2^100");
  return value;
}

NamespaceObject* Runtime::name_space() {
  room(4 * kObjectBytes);
  step();
  namespace_charges_.emplace_back(&live_, 4 * kObjectBytes);
  return &namespaces_.emplace_back();
}

ArgReader::ArgReader(Runtime& runtime, std::string_view callee, const Args& args, std::initializer_list<std::string_view> names,
                     size_t required)
    : runtime_(runtime), callee_(callee), names_(names.begin(), names.end()), found_(names.size(), nullptr) {
  if (args.positional.size() > names_.size()) {
    runtime_.fail("{}: found {} arguments, expected at most {}", callee_, args.positional.size(), names_.size());
  }
  for (size_t i = 0; i < args.positional.size(); ++i) found_[i] = &args.positional[i];
  for (const auto& [name, value] : args.keyword) {
    const auto at = std::find(names_.begin(), names_.end(), name);
    if (at == names_.end()) runtime_.fail("{}: found an argument named '{}', expected none of that name", callee_, printable(name));
    const Value*& slot = found_[static_cast<size_t>(at - names_.begin())];
    if (slot != nullptr) runtime_.fail("{}: argument '{}' is given twice", callee_, name);
    slot = &value;
  }
  for (size_t i = 0; i < required; ++i) {
    if (found_[i] == nullptr) runtime_.fail("{}: argument '{}' is missing", callee_, names_[i]);
  }
}

const std::string& ArgReader::text(size_t i) const {
  if (found_[i] == nullptr || !found_[i]->is_string()) {
    runtime_.fail("{}: found {} for '{}', expected a string", callee_, found_[i] == nullptr ? "nothing" : found_[i]->type_name(),
                  names_[i]);
  }
  return found_[i]->text();
}

int64_t ArgReader::integer(size_t i, int64_t fallback) const {
  if (found_[i] == nullptr) return fallback;
  if (!found_[i]->is_int()) runtime_.fail("{}: found {} for '{}', expected an integer", callee_, found_[i]->type_name(), names_[i]);
  const Int value = found_[i]->integer();
  constexpr Int kLargest = INT64_MAX / 4;  // room for sums of a few of them
  return static_cast<int64_t>(std::clamp(value, -kLargest, kLargest));
}

}  // namespace cachalot::jinja
