// The parsed form of a template: expressions and statements. Nothing here changes after parsing.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "text/jinja_value.h"

namespace cachalot::jinja {

struct Expr;
using ExprPtr = std::unique_ptr<Expr>;

struct CallArgs {
  std::vector<ExprPtr> positional;
  std::vector<std::pair<std::string, ExprPtr>> keyword;
  ExprPtr spread, spread_keywords;  // *list and **dict
};

struct Expr {
  enum class Kind : uint8_t {
    kConst,      // value
    kName,       // name
    kList,       // children
    kTuple,      // children
    kDict,       // children: key, value, key, value ...
    kAttribute,  // children[0].name
    kItem,       // children[0][children[1]]
    kSlice,      // children[0][children[1]:children[2]:children[3]], each bound may be null
    kCall,       // children[0](args)
    kFilter,     // children[0] | name(args); no child inside a filter block, whose text it takes
    kTest,       // children[0] is name(args)
    kUnary,      // name ("-", "+", "not") children[0]
    kBinary,     // children[0] name children[1]: + - * / // % **
    kConcat,     // children[0] ~ children[1] ~ ...
    kCompare,    // children[0] operators[0] children[1] operators[1] ...
    kAnd,        // children[0] and children[1]
    kOr,
    kIf,  // children[0] if children[1] else children[2], which may be null
  };
  Kind kind;
  int line;
  int height = 1;  // of the tree below, this one included
  std::string name;
  Value value;
  std::vector<ExprPtr> children;
  std::vector<std::string> operators;
  CallArgs args;
};

// What can stand left of "=": a name, namespace.attribute, or a tuple of targets.
struct Target {
  int line = 0;
  std::string name, attribute;
  std::vector<Target> parts;
};

struct Statement;
using Body = std::vector<std::unique_ptr<Statement>>;

struct MacroNode {
  std::string name;
  std::vector<std::string> parameters;
  std::vector<ExprPtr> defaults;                                        // of the last parameters
  bool uses_varargs = false, uses_kwargs = false, uses_caller = false;  // only then may a call give more than the parameters
  Body body;
};

struct Statement {
  enum class Kind : uint8_t {
    kText,        // text
    kOutput,      // {{ expr }}
    kIf,          // branches, else in a branch without a condition
    kFor,         // target in expr, condition, body, otherwise
    kSet,         // target = expr
    kSetBlock,    // target = text of body, through the filters of expr when there are any
    kMacro,       // macro
    kCall,        // expr is the call, macro the caller
    kFilter,      // body through the filters of expr
    kWith,        // targets[i] = values[i] around body
    kGeneration,  // body, in a scope of its own
    kBreak,
    kContinue,
  };
  struct Branch {
    ExprPtr condition;
    Body body;
  };
  Kind kind;
  int line;
  std::string text;
  ExprPtr expr, condition;
  Target target;
  Body body, otherwise;
  std::vector<Branch> branches;
  std::vector<std::pair<Target, ExprPtr>> bindings;
  MacroNode macro;
};

}  // namespace cachalot::jinja
