// Value: what expressions of a chat template evaluate to, with the meaning Python gives it (the language the templates are written for).
// Values are data only: there is no path from a Value to anything outside the render that made it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace cachalot::jinja {

__extension__ typedef __int128 Int;  // NOLINT(modernize-use-using): holds every JSON integer; arithmetic past 2^100 is an Error

class Runtime;
class Value;
struct MacroNode;
struct Scope;

// Bytes counted against a render's memory limit until the owner goes.
class Charge {
 public:
  Charge() = default;
  Charge(size_t* live, size_t bytes) : live_(live), bytes_(bytes) { *live_ += bytes_; }
  Charge(const Charge&) = delete;
  Charge& operator=(const Charge&) = delete;
  ~Charge() {
    if (live_ != nullptr) *live_ -= bytes_;
  }

 private:
  size_t* live_ = nullptr;
  size_t bytes_ = 0;
};

// The outcome of a lookup that found nothing: prints as nothing, is false and empty, and any other use of it is an Error.
struct Undefined {
  const std::string* name = nullptr;  // for the message; lives in the template
};
struct None {};

struct StringObject {
  std::string text;  // valid UTF-8
  bool markup;       // made by `safe` or `escape`: adding plain text to it escapes that text
  Charge charge;
};

enum class SequenceKind : uint8_t { kList, kTuple, kRange, kKeys, kValues, kItems };

struct SequenceObject {
  SequenceKind kind;
  std::vector<Value> items;
  int depth;  // containers inside one another, this one included
  Charge charge;
};

struct DictObject {
  std::vector<std::pair<Value, Value>> entries;  // in order of insertion, keys unique
  int depth;
  Charge charge;
};

// What `map`, `select`, `items` ... give: read once, always true, without a length.
struct IteratorObject {
  std::vector<Value> items;
  size_t next;
  int depth;
  Charge charge;
};

struct LoopObject {
  std::shared_ptr<const SequenceObject> items;
  size_t index;  // of the current item
  Charge charge;
};

struct NamespaceObject;
struct CallableObject;

class Value {
 public:
  Value() = default;
  Value(Undefined u) : data_(u) {}  // NOLINT(google-explicit-constructor): as are the next: a Value is any of these
  Value(None n) : data_(n) {}
  Value(bool b) : data_(b) {}
  Value(Int i) : data_(i) {}
  Value(int i) : data_(static_cast<Int>(i)) {}
  Value(double d) : data_(d) {}
  Value(std::shared_ptr<const StringObject> s) : data_(std::move(s)) {}
  Value(std::shared_ptr<const SequenceObject> s) : data_(std::move(s)) {}
  Value(std::shared_ptr<const DictObject> d) : data_(std::move(d)) {}
  Value(std::shared_ptr<IteratorObject> i) : data_(std::move(i)) {}
  Value(std::shared_ptr<LoopObject> l) : data_(std::move(l)) {}
  Value(std::shared_ptr<const CallableObject> c) : data_(std::move(c)) {}
  Value(NamespaceObject* n) : data_(n) {}
  Value(const char*) = delete;  // would be taken for a boolean; see Runtime::string

  [[nodiscard]] bool is_undefined() const { return holds<Undefined>(); }
  [[nodiscard]] bool is_none() const { return holds<None>(); }
  [[nodiscard]] bool is_bool() const { return holds<bool>(); }
  [[nodiscard]] bool is_int() const { return holds<Int>() || holds<bool>(); }  // as in Python, booleans are integers
  [[nodiscard]] bool is_float() const { return holds<double>(); }
  [[nodiscard]] bool is_number() const { return is_int() || is_float(); }
  [[nodiscard]] bool is_string() const { return holds<std::shared_ptr<const StringObject>>(); }
  [[nodiscard]] bool is_sequence() const { return holds<std::shared_ptr<const SequenceObject>>(); }
  [[nodiscard]] bool is_sequence(SequenceKind kind) const { return is_sequence() && sequence()->kind == kind; }
  [[nodiscard]] bool is_dict() const { return holds<std::shared_ptr<const DictObject>>(); }
  [[nodiscard]] bool is_iterator() const { return holds<std::shared_ptr<IteratorObject>>(); }
  [[nodiscard]] bool is_loop() const { return holds<std::shared_ptr<LoopObject>>(); }
  [[nodiscard]] bool is_callable() const { return holds<std::shared_ptr<const CallableObject>>(); }
  [[nodiscard]] bool is_namespace() const { return holds<NamespaceObject*>(); }

  // The holder must have been asked for with is_*() before.
  [[nodiscard]] const Undefined& undefined() const { return std::get<Undefined>(data_); }
  [[nodiscard]] Int integer() const { return holds<bool>() ? static_cast<Int>(std::get<bool>(data_)) : std::get<Int>(data_); }
  [[nodiscard]] double number() const { return is_float() ? std::get<double>(data_) : static_cast<double>(integer()); }
  [[nodiscard]] bool boolean() const { return std::get<bool>(data_); }
  [[nodiscard]] const std::string& text() const { return std::get<std::shared_ptr<const StringObject>>(data_)->text; }
  [[nodiscard]] bool is_markup() const { return is_string() && std::get<std::shared_ptr<const StringObject>>(data_)->markup; }
  [[nodiscard]] const std::shared_ptr<const SequenceObject>& sequence() const {
    return std::get<std::shared_ptr<const SequenceObject>>(data_);
  }
  [[nodiscard]] const std::vector<Value>& items() const { return sequence()->items; }
  [[nodiscard]] const DictObject& dict() const { return *std::get<std::shared_ptr<const DictObject>>(data_); }
  [[nodiscard]] IteratorObject& iterator() const { return *std::get<std::shared_ptr<IteratorObject>>(data_); }
  [[nodiscard]] LoopObject& loop() const { return *std::get<std::shared_ptr<LoopObject>>(data_); }
  [[nodiscard]] const CallableObject& callable() const { return *std::get<std::shared_ptr<const CallableObject>>(data_); }
  [[nodiscard]] NamespaceObject& name_space() const { return *std::get<NamespaceObject*>(data_); }

  [[nodiscard]] bool truthy() const;
  [[nodiscard]] int depth() const;              // 0 for anything that holds no other value
  [[nodiscard]] const char* type_name() const;  // as Python names it in messages
  [[nodiscard]] bool same_object(const Value& other) const;

 private:
  template <typename T>
  [[nodiscard]] bool holds() const {
    return std::holds_alternative<T>(data_);
  }
  std::variant<Undefined, None, bool, Int, double, std::shared_ptr<const StringObject>, std::shared_ptr<const SequenceObject>,
               std::shared_ptr<const DictObject>, std::shared_ptr<IteratorObject>, std::shared_ptr<LoopObject>,
               std::shared_ptr<const CallableObject>, NamespaceObject*>
      data_;
};

// namespace(...): the one thing a template can change. Owned by the Runtime, so that a namespace that holds itself is no leak.
struct NamespaceObject {
  std::vector<std::pair<std::string, Value>> attributes;
};

struct CallableObject {
  enum class Kind : uint8_t { kGlobal, kMethod, kMacro } kind;
  std::string name;
  Value self;                        // kMethod: the string, list or dict it is called on
  const MacroNode* macro = nullptr;  // kMacro
  Scope* scope = nullptr;            // kMacro: where it was defined; owned by the evaluator
  Charge charge{};
};

// Arguments of a call, filter or test.
struct Args {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> keyword;
};

std::string int_text(Int value);
std::string float_text(double value);                           // Python's repr(): shortest digits that read back equal
std::string to_text(Runtime& runtime, const Value& value);      // Python's str()
std::string repr(Runtime& runtime, const Value& value);         // Python's repr()
bool equal(Runtime& runtime, const Value& a, const Value& b);   // ==
int compare(Runtime& runtime, const Value& a, const Value& b);  // <0, 0, >0; Error for types that have no order; NaN is not handled
bool contains(Runtime& runtime, const Value& container, const Value& item);         // item in container
const Value* find_key(Runtime& runtime, const DictObject& dict, const Value& key);  // null when absent
// The items a `for` would visit. Reading an iterator empties it.
std::shared_ptr<const SequenceObject> iterate(Runtime& runtime, const Value& value);

}  // namespace cachalot::jinja
