// The methods of strings that templates may call.
#include <algorithm>

#include "text/jinja_builtins.h"
#include "text/jinja_text.h"

namespace cachalot::jinja {
namespace {

Value list_of(Runtime& runtime, const std::vector<std::string_view>& parts, SequenceKind kind = SequenceKind::kList) {
  runtime.room(parts.size(), 4 * sizeof(Value));
  std::vector<Value> items;
  for (const std::string_view part : parts) items.push_back(runtime.string(part));
  return runtime.sequence(kind, std::move(items));
}

// Null for an argument left out or none.
const std::string* optional_text(const ArgReader& reader, size_t i) {
  return reader.get(i) == nullptr || reader.get(i)->is_none() ? nullptr : &reader.text(i);
}

Value split_method(Runtime& runtime, const std::string& name, const std::string& text, const Args& args) {
  const ArgReader reader(runtime, name, args, {"sep", "maxsplit"});
  const std::string* separator = optional_text(reader, 0);
  if (separator != nullptr && separator->empty()) runtime.fail("{}: found an empty separator", name);
  runtime.room(text.size() + 1, sizeof(std::string_view));
  runtime.scan(4 * text.size());
  return list_of(runtime, name == "split" ? split(text, separator, reader.integer(1, -1)) : rsplit(text, separator, reader.integer(1, -1)));
}

Value strip_method(Runtime& runtime, const std::string& name, const std::string& text, const Args& args) {
  const ArgReader reader(runtime, name, args, {"chars"});
  if (const std::string* chars = optional_text(reader, 0); chars != nullptr) {  // they are sorted, then looked up for each character
    runtime.room(chars->size(), sizeof(char32_t));
    runtime.scan(16 * (text.size() + chars->size()));
  }
  const Side side = name == "strip" ? Side::kBoth : name == "lstrip" ? Side::kLeft : Side::kRight;
  return runtime.string(strip(text, optional_text(reader, 0), side));
}

// The part text[start:end] in characters, as the optional arguments of find, startswith and the like select it.
std::string_view window(const ArgReader& reader, const std::string& text, size_t& first_char) {
  if (reader.get(1) == nullptr && reader.get(2) == nullptr) return text;
  const auto n = static_cast<int64_t>(count_chars(text));
  const auto bound = [&](size_t i, int64_t fallback) {
    if (reader.get(i) == nullptr || reader.get(i)->is_none()) return fallback;
    const int64_t at = reader.integer(i, fallback);
    return std::clamp<int64_t>(at < 0 ? at + n : at, 0, n);
  };
  const int64_t start = bound(1, 0), end = std::max(bound(2, n), start);
  first_char = static_cast<size_t>(start);
  const size_t begin = char_offset(text, static_cast<size_t>(start));
  return std::string_view(text).substr(begin, char_offset(text, static_cast<size_t>(end)) - begin);
}

Value affix_method(Runtime& runtime, const std::string& name, const std::string& text, const Args& args) {
  const ArgReader reader(runtime, name, args, {"prefix", "start", "end"}, 1);
  size_t first_char = 0;
  const std::string_view part = window(reader, text, first_char);
  const auto matches = [&](const Value& affix) {
    if (!affix.is_string()) runtime.fail("{}: found {}, expected a string or a tuple of strings", name, affix.type_name());
    return name == "startswith" ? part.starts_with(affix.text()) : part.ends_with(affix.text());
  };
  const Value& affix = *reader.get(0);
  if (!affix.is_sequence(SequenceKind::kTuple)) return matches(affix);
  return std::any_of(affix.items().begin(), affix.items().end(), matches);
}

Value search_method(Runtime& runtime, const std::string& name, const std::string& text, const Args& args) {
  const ArgReader reader(runtime, name, args, {"sub", "start", "end"}, 1);
  size_t first_char = 0;
  const std::string_view part = window(reader, text, first_char);
  const std::string& needle = reader.text(0);
  runtime.scan(4 * (text.size() + needle.size()));
  if (name == "count") return static_cast<Int>(count(part, needle));
  const size_t at = name[0] == 'r' ? rfind(part, needle) : find(part, needle);
  if (at != std::string_view::npos) return static_cast<Int>(first_char + count_chars(part.substr(0, at)));
  if (name == "index" || name == "rindex") runtime.fail("{}: the text was not found", name);
  return -1;
}

Value partition_method(Runtime& runtime, const std::string& name, const std::string& text, const Args& args) {
  const ArgReader reader(runtime, name, args, {"sep"}, 1);
  const std::string& separator = reader.text(0);
  if (separator.empty()) runtime.fail("{}: found an empty separator", name);
  const std::string_view view = text;
  const bool from_right = name == "rpartition";
  runtime.scan(4 * text.size());
  const size_t at = from_right ? rfind(view, separator) : find(view, separator);
  if (at == std::string_view::npos) {
    return list_of(runtime, from_right ? std::vector<std::string_view>{"", "", view} : std::vector<std::string_view>{view, "", ""},
                   SequenceKind::kTuple);
  }
  return list_of(runtime, {view.substr(0, at), view.substr(at, separator.size()), view.substr(at + separator.size())},
                 SequenceKind::kTuple);
}

Value pad_method(Runtime& runtime, const std::string& name, const std::string& text, const Args& args) {
  const ArgReader reader(runtime, name, args, {"width", "fillchar"}, 1);
  const std::string fill = name == "zfill" ? "0" : reader.get(1) != nullptr ? reader.text(1) : " ";
  if (count_chars(fill) != 1) runtime.fail("{}: found a fill of {} characters, expected one", name, count_chars(fill));
  const int64_t missing = reader.integer(0, 0) - static_cast<int64_t>(count_chars(text));
  if (missing <= 0) return runtime.string(text);
  const auto width = static_cast<size_t>(missing);
  runtime.room(width, fill.size());
  // Python's centre puts the odd space left when the width is odd.
  const size_t left = name == "center" ? width / 2 + (width & static_cast<size_t>(reader.integer(0, 0)) & 1) : name == "ljust" ? 0 : width;
  std::string out;
  for (size_t i = 0; i < left; ++i) out += fill;
  const bool sign_first = name == "zfill" && !text.empty() && (text[0] == '-' || text[0] == '+');
  if (sign_first) out.insert(out.begin(), text[0]);
  out += sign_first ? text.substr(1) : text;
  for (size_t i = left; i < width; ++i) out += fill;
  return runtime.string(std::move(out));
}

bool all_chars(std::string_view text, bool (*holds)(char32_t)) {
  for (size_t at = 0; at < text.size();) {
    if (!holds(next_char(text, at))) return false;
  }
  return !text.empty();
}

// isupper, islower: at least one cased character and none of the other case.
bool has_only_case(std::string_view text, bool (*wanted)(char32_t), bool (*other)(char32_t)) {
  bool any = false;
  for (size_t at = 0; at < text.size();) {
    const char32_t c = next_char(text, at);
    if (other(c)) return false;
    any = any || wanted(c);
  }
  return any;
}

bool is_like(const std::string& name, const std::string& text) {
  if (name == "isdigit" || name == "isdecimal" || name == "isnumeric") return all_chars(text, is_decimal);
  if (name == "isalpha") return all_chars(text, is_letter);
  if (name == "isalnum") return all_chars(text, [](char32_t c) { return is_letter(c) || is_decimal(c); });
  if (name == "isspace") return all_chars(text, is_space);
  if (name == "isprintable") return text.empty() || all_chars(text, is_printable);
  if (name == "isascii") return std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; });
  if (name == "isupper") return has_only_case(text, is_upper, is_lower);
  if (name == "islower") return has_only_case(text, is_lower, is_upper);
  if (name == "istitle") return text == title(text) && text != lower(text);
  const bool starts_well = !text.empty() && !(text[0] >= '0' && text[0] <= '9');
  return starts_well && all_chars(text, [](char32_t c) { return c == '_' || is_letter(c) || is_decimal(c); });
}

Value case_method(Runtime& runtime, const std::string& name, const std::string& text) {
  runtime.room(text.size(), 3);
  if (name == "upper") return runtime.string(upper(text));
  if (name == "title") return runtime.string(title(text));
  if (name == "capitalize") return runtime.string(capitalize(text));
  if (name == "swapcase") return runtime.string(swapcase(text));
  return runtime.string(lower(text));
}

Value other_method(Runtime& runtime, const std::string& name, const std::string& text, const Args& args) {
  if (name == "replace") {
    const ArgReader reader(runtime, name, args, {"old", "new", "count"}, 2);
    return runtime.string(replace(runtime, text, reader.text(0), reader.text(1), reader.integer(2, -1)));
  }
  if (name == "join") {
    const ArgReader reader(runtime, name, args, {"iterable"}, 1);
    return join(runtime, text, iterate(runtime, *reader.get(0))->items, true);
  }
  if (name == "format") return brace_format(runtime, text, args);
  if (name == "removeprefix" || name == "removesuffix") {
    const ArgReader reader(runtime, name, args, {"affix"}, 1);
    const std::string& affix = reader.text(0);
    const bool front = name == "removeprefix";
    if (!(front ? text.starts_with(affix) : text.ends_with(affix))) return runtime.string(text);
    return runtime.string(front ? text.substr(affix.size()) : text.substr(0, text.size() - affix.size()));
  }
  if (name == "expandtabs") {
    const ArgReader reader(runtime, name, args, {"tabsize"});
    const auto size = static_cast<size_t>(std::clamp<int64_t>(reader.integer(0, 8), 0, 1000));
    runtime.room(count(text, "\t") + 1, size);
    std::string out;
    size_t column = 0;
    for (const char c : text) {
      const size_t spaces = c == '\t' && size > 0 ? size - column % size : 0;
      out.append(c == '\t' ? spaces : 1, c == '\t' ? ' ' : c);
      column = c == '\n' || c == '\r' ? 0 : column + (c == '\t' ? spaces : (static_cast<unsigned char>(c) & 0xc0) != 0x80 ? 1 : 0);
    }
    return runtime.string(std::move(out));
  }
  const ArgReader reader(runtime, name, args, {"keepends"});
  return list_of(runtime, split_lines(text, reader.flag(0, false)));
}

}  // namespace

std::string replace(Runtime& runtime, std::string_view text, std::string_view from, std::string_view to, int64_t limit) {
  runtime.scan(text.size());
  std::string out;
  int64_t done = 0;
  size_t at = 0;
  const auto may_go_on = [&] { return limit < 0 || done < limit; };
  if (from.empty()) {  // before each character and at the end
    runtime.room((count_chars(text) + 1), to.size() + 4);
    while (may_go_on()) {
      out += to;
      ++done;
      if (at >= text.size()) break;
      const size_t start = at;
      next_char(text, at);
      out += text.substr(start, at - start);
    }
  } else {
    for (size_t found; may_go_on() && (found = jinja::find(text, from, at)) != std::string_view::npos; ++done) {
      runtime.step();
      runtime.room(out.size() + to.size());
      out += text.substr(at, found - at);
      out += to;
      at = found + from.size();
    }
  }
  out += text.substr(at);
  return out;
}

Value join(Runtime& runtime, std::string_view separator, const std::vector<Value>& items, bool only_strings) {
  std::string out;
  for (size_t i = 0; i < items.size(); ++i) {
    if (only_strings && !items[i].is_string()) runtime.fail("join: found {}, expected strings", items[i].type_name());
    if (i != 0) out += separator;
    runtime.step();
    out += to_text(runtime, items[i]);
    runtime.room(out.size() + separator.size());
  }
  return runtime.string(std::move(out));
}

Value call_string_method(Runtime& runtime, const std::string& name, const Value& self, const Args& args) {
  const std::string& text = self.text();
  runtime.scan(text.size());
  if (name == "split" || name == "rsplit") return split_method(runtime, name, text, args);
  if (name == "strip" || name == "lstrip" || name == "rstrip") return strip_method(runtime, name, text, args);
  if (name == "startswith" || name == "endswith") return affix_method(runtime, name, text, args);
  if (name == "find" || name == "rfind" || name == "index" || name == "rindex" || name == "count")
    return search_method(runtime, name, text, args);
  if (name == "partition" || name == "rpartition") return partition_method(runtime, name, text, args);
  if (name == "center" || name == "ljust" || name == "rjust" || name == "zfill") return pad_method(runtime, name, text, args);
  if (name.starts_with("is")) {
    const ArgReader none(runtime, name, args, {});
    return is_like(name, text);
  }
  if (name == "upper" || name == "lower" || name == "casefold" || name == "title" || name == "capitalize" || name == "swapcase") {
    const ArgReader none(runtime, name, args, {});
    return case_method(runtime, name, text);
  }
  return other_method(runtime, name, text, args);
}

}  // namespace cachalot::jinja
