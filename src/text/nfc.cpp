// Canonical composition (Unicode Standard Annex 15) over the generated tables; Hangul is computed.
#include <algorithm>
#include <unordered_map>
#include <vector>

#include "text/unicode.h"
#include "text/unicode_tables.h"

namespace cachalot::unicode {
namespace {

constexpr uint32_t kHangulBase = 0xAC00, kLBase = 0x1100, kVBase = 0x1161, kTBase = 0x11A7;
constexpr uint32_t kLCount = 19, kVCount = 21, kTCount = 28, kHangulCount = kLCount * kVCount * kTCount;

// A character under work. Invalid bytes travel as kInvalidByte + byte, which no table knows: starters that never combine.
struct Item {
  uint32_t code;
  uint8_t combining_class;
};

struct Tables {
  std::unordered_map<uint32_t, std::pair<uint32_t, uint32_t>> parts;
  std::unordered_map<uint64_t, uint32_t> composed;  // first << 32 | second
  std::unordered_map<uint32_t, uint8_t> combining_class;

  Tables() {
    for (size_t i = 0; i < kDecompositionsSize; i += 3) {
      const uint32_t code = kDecompositions[i] & 0x7FFFFFFF;
      const uint32_t first = kDecompositions[i + 1], second = kDecompositions[i + 2];
      parts[code] = {first, second};
      if (kDecompositions[i] >> 31 == 0) composed[static_cast<uint64_t>(first) << 32 | second] = code;
    }
    for (size_t i = 0; i + 1 < kCombiningRunsSize; ++i) {
      const auto value = static_cast<uint8_t>(kCombiningRuns[i] & 0xFF);
      if (value == 0) continue;
      for (uint32_t code = kCombiningRuns[i] >> 8; code < kCombiningRuns[i + 1] >> 8; ++code) combining_class[code] = value;
    }
  }
};

const Tables& tables() {
  static const Tables instance;
  return instance;
}

uint8_t combining_class(uint32_t code) {
  if (code < 0x300) return 0;
  const auto it = tables().combining_class.find(code);
  return it == tables().combining_class.end() ? 0 : it->second;
}

// The depth of canonical decompositions is at most four, as the tables are constant.
void decompose(uint32_t code, std::vector<Item>& out) {
  if (code >= kHangulBase && code < kHangulBase + kHangulCount) {
    const uint32_t index = code - kHangulBase;
    out.push_back({kLBase + index / (kVCount * kTCount), 0});
    out.push_back({kVBase + index % (kVCount * kTCount) / kTCount, 0});
    if (index % kTCount != 0) out.push_back({kTBase + index % kTCount, 0});
    return;
  }
  const auto it = code < 0xC0 ? tables().parts.end() : tables().parts.find(code);
  if (it == tables().parts.end()) {
    out.push_back({code, combining_class(code)});
    return;
  }
  decompose(it->second.first, out);
  if (it->second.second != 0) decompose(it->second.second, out);
}

// 0 when the two do not compose.
uint32_t compose(uint32_t first, uint32_t second) {
  if (first >= kLBase && first < kLBase + kLCount && second >= kVBase && second < kVBase + kVCount)
    return kHangulBase + ((first - kLBase) * kVCount + (second - kVBase)) * kTCount;
  if (first >= kHangulBase && first < kHangulBase + kHangulCount && (first - kHangulBase) % kTCount == 0 && second > kTBase &&
      second < kTBase + kTCount)
    return first + (second - kTBase);
  const auto it = tables().composed.find(static_cast<uint64_t>(first) << 32 | second);
  return it == tables().composed.end() ? 0 : it->second;
}

void order_marks(std::vector<Item>& items) {
  for (size_t begin = 0; begin < items.size();) {
    size_t end = begin + 1;
    if (items[begin].combining_class != 0) {
      while (end < items.size() && items[end].combining_class != 0) ++end;
      std::stable_sort(items.begin() + static_cast<ptrdiff_t>(begin), items.begin() + static_cast<ptrdiff_t>(end),
                       [](const Item& a, const Item& b) { return a.combining_class < b.combining_class; });
    }
    begin = end;
  }
}

void compose_all(std::vector<Item>& items) {
  constexpr size_t kNone = static_cast<size_t>(-1);
  size_t starter = kNone, kept = 0;
  int last_class = -1;  // class of the last kept character after the starter; -1 right after it
  for (const Item item : items) {
    if (starter != kNone && last_class < item.combining_class) {
      if (const uint32_t code = compose(items[starter].code, item.code); code != 0) {
        items[starter].code = code;
        continue;
      }
    }
    if (item.combining_class == 0) {
      starter = kept;
      last_class = -1;
    } else {
      last_class = item.combining_class;
    }
    items[kept++] = item;
  }
  items.resize(kept);
}

}  // namespace

bool is_surely_nfc(std::string_view text) {
  const uint8_t* const table = flag_table();
  const char* const end = text.data() + text.size();
  for (const char* p = text.data(); p < end;) {
    const Char c = char_at(p, end, table);
    if (c.flags & kUnsettled) return false;
    p += c.size;
  }
  return true;
}

std::string nfc(std::string_view text) {
  if (is_surely_nfc(text)) return std::string(text);
  std::vector<Item> items;
  items.reserve(text.size());
  const uint8_t* const table = flag_table();
  const char* const end = text.data() + text.size();
  for (const char* p = text.data(); p < end;) {
    const Char c = char_at(p, end, table);
    if (c.code == kInvalidByte) {
      items.push_back({kInvalidByte + static_cast<uint8_t>(*p), 0});
    } else {
      decompose(c.code, items);
    }
    p += c.size;
  }
  order_marks(items);
  compose_all(items);
  std::string out;
  out.reserve(text.size());
  for (const Item item : items) {
    if (item.code >= kInvalidByte) {
      out += static_cast<char>(item.code - kInvalidByte);
    } else {
      append_utf8(item.code, out);
    }
  }
  return out;
}

}  // namespace cachalot::unicode
