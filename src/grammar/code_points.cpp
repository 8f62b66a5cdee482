// Ranges of code points to sequences of byte ranges (as in Russ Cox, "Regular Expression Matching in the Wild", 2010: split where the
// length of the UTF-8 form changes, then where a continuation byte leaves its full range).
#include "grammar/code_points.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"

namespace cachalot {
namespace {

constexpr uint32_t kSurrogateLow = 0xD800, kSurrogateHigh = 0xDFFF;

int utf8_bytes(uint32_t c, uint8_t* out) {
  if (c < 0x80) {
    out[0] = static_cast<uint8_t>(c);
    return 1;
  }
  const int n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
  for (int i = n - 1; i > 0; --i, c >>= 6) out[i] = static_cast<uint8_t>(0x80 | (c & 0x3F));
  static constexpr uint8_t kLead[] = {0, 0, 0xC0, 0xE0, 0xF0};
  out[0] = static_cast<uint8_t>(kLead[n] | c);
  return n;
}

// Alternatives for the code points low to high, all spelled with the same number of bytes.
void add_utf8_range(Grammar& g, uint32_t low, uint32_t high, std::vector<Grammar::Expr>& out) {
  for (int bits = 6; bits <= 18; bits += 6) {
    const uint32_t mask = (1u << bits) - 1;
    if ((low & ~mask) == (high & ~mask)) continue;
    if ((low & mask) != 0) {
      add_utf8_range(g, low, low | mask, out);
      return add_utf8_range(g, (low | mask) + 1, high, out);
    }
    if ((high & mask) != mask) {
      add_utf8_range(g, low, (high & ~mask) - 1, out);
      return add_utf8_range(g, high & ~mask, high, out);
    }
  }
  uint8_t from[4], to[4];
  const int n = utf8_bytes(low, from);
  utf8_bytes(high, to);
  std::vector<Grammar::Expr> parts;
  for (int i = 0; i < n; ++i) parts.push_back(g.byte_range(from[i], to[i]));
  out.push_back(g.sequence(parts));
}

void add_utf8(Grammar& g, CodePoints::Range r, std::vector<Grammar::Expr>& out, ByteSet& ascii) {
  static constexpr uint32_t kEnds[] = {0x7F, 0x7FF, 0xFFFF, CodePoints::kLast};
  for (const uint32_t end : kEnds) {
    if (r.low > r.high) return;
    const uint32_t high = std::min(r.high, end);
    if (r.low > high) continue;
    if (end == 0x7F)
      for (uint32_t c = r.low; c <= high; ++c) ascii.set(c);
    else
      add_utf8_range(g, r.low, high, out);
    r.low = high + 1;
  }
}

}  // namespace

void CodePoints::add(uint32_t low, uint32_t high) { ranges_.push_back({low, high}); }
void CodePoints::add(const CodePoints& other) { ranges_.insert(ranges_.end(), other.ranges_.begin(), other.ranges_.end()); }

std::vector<CodePoints::Range> CodePoints::ranges() const {
  std::vector<Range> sorted = ranges_, out;
  std::sort(sorted.begin(), sorted.end(), [](const Range& a, const Range& b) { return a.low < b.low; });
  for (const Range& r : sorted) {
    if (!out.empty() && r.low <= out.back().high + 1)
      out.back().high = std::max(out.back().high, r.high);
    else
      out.push_back(r);
  }
  return out;
}

CodePoints CodePoints::complement() const {
  CodePoints with = *this, out;
  with.add(kSurrogateLow, kSurrogateHigh);
  uint32_t next = 0;
  for (const Range& r : with.ranges()) {
    if (r.low > next) out.add(next, r.low - 1);
    next = r.high + 1;
  }
  if (next <= kLast) out.add(next, kLast);
  return out;
}

CodePoints CodePoints::without(const CodePoints& other) const {
  CodePoints out = complement();
  out.add(other);
  return out.complement();
}

CodePoints CodePoints::all() { return CodePoints().complement(); }

CodePoints CodePoints::of(uint32_t c) {
  CodePoints out;
  out.add(c, c);
  return out;
}

Grammar::Expr any_of(Grammar& g, const CodePoints& set, Spelling spelling) {
  CodePoints plain = set.complement().complement();  // drops surrogates
  std::vector<Grammar::Expr> parts;
  if (spelling == Spelling::json_string) {
    // What RFC 8259 asks to be escaped. The two-character forms where they exist, else \u00xx.
    static constexpr std::pair<uint32_t, const char*> kEscapes[] = {{'"', "\\\""}, {'\\', "\\\\"}, {'\b', "\\b"}, {'\f', "\\f"},
                                                                    {'\n', "\\n"}, {'\r', "\\r"},  {'\t', "\\t"}};
    CodePoints escaped;
    escaped.add(0, 0x1F);
    escaped.add('"', '"');
    escaped.add('\\', '\\');
    const auto inside = plain.ranges();
    const auto has = [&](uint32_t c) {
      return std::any_of(inside.begin(), inside.end(), [&](const auto& r) { return r.low <= c && c <= r.high; });
    };
    const auto short_form = [&](uint32_t c) {
      return std::find_if(std::begin(kEscapes), std::end(kEscapes), [&](const auto& e) { return e.first == c; });
    };
    for (const auto& [c, text] : kEscapes)
      if (has(c)) parts.push_back(g.literal(text));
    for (uint32_t c = 0; c < 0x20; ++c)
      if (has(c) && short_form(c) == std::end(kEscapes)) parts.push_back(g.literal(fmt::format("\\u{:04x}", c)));
    plain = plain.without(escaped);
  }
  ByteSet ascii;
  for (const CodePoints::Range& r : plain.ranges()) add_utf8(g, r, parts, ascii);
  if (ascii.any()) parts.push_back(g.bytes(ascii));
  if (parts.empty()) fail("a character class is empty");
  return g.choice(parts);
}

uint32_t next_code_point(std::string_view text, size_t& at) {
  const auto byte = [&](size_t i) { return static_cast<uint32_t>(static_cast<unsigned char>(text[i])); };
  const uint32_t lead = byte(at);
  const int n = lead < 0x80 ? 1 : lead >= 0xC2 && lead < 0xE0 ? 2 : lead >= 0xE0 && lead < 0xF0 ? 3 : lead >= 0xF0 && lead < 0xF5 ? 4 : 0;
  if (n == 0 || at + static_cast<size_t>(n) > text.size()) fail("byte {} is no UTF-8", at);
  uint32_t c = n == 1 ? lead : lead & (0x7Fu >> n);
  for (int i = 1; i < n; ++i) {
    const uint32_t next = byte(at + static_cast<size_t>(i));
    if ((next & 0xC0) != 0x80) fail("byte {} is no UTF-8", at + static_cast<size_t>(i));
    c = c << 6 | (next & 0x3F);
  }
  static constexpr uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  if (c < kSmallest[n] || c > CodePoints::kLast || (c >= kSurrogateLow && c <= kSurrogateHigh)) fail("byte {} is no UTF-8", at);
  at += static_cast<size_t>(n);
  return c;
}

}  // namespace cachalot
