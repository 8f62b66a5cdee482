// UTF-8 decoding, class tables, the byte alphabet. NFC is in nfc.cpp.
#include "text/unicode.h"

#include <array>
#include <memory>
#include <utility>

#include "text/unicode_tables.h"

namespace cachalot::unicode {
namespace {

// The letters that the DeepSeek-LLM pre-tokenizer lists: pairs of first and last.
constexpr std::pair<uint32_t, uint32_t> kCasedRanges[] = {
    {0x41, 0x5A},       {0x61, 0x7A},       {0xB5, 0xB5},       {0xC0, 0xD6},       {0xD8, 0xF6},       {0xF8, 0x1BA},
    {0x1BC, 0x1BF},     {0x1C4, 0x293},     {0x295, 0x2AF},     {0x370, 0x373},     {0x376, 0x376},     {0x377, 0x377},
    {0x37B, 0x37D},     {0x37F, 0x37F},     {0x386, 0x386},     {0x388, 0x38A},     {0x38C, 0x38C},     {0x38E, 0x3A1},
    {0x3A3, 0x3F5},     {0x3F7, 0x481},     {0x48A, 0x52F},     {0x531, 0x556},     {0x10A0, 0x10C5},   {0x13A0, 0x13F5},
    {0x13F8, 0x13FD},   {0x1C90, 0x1CBA},   {0x1CBD, 0x1CBF},   {0x1D00, 0x1D2B},   {0x1D6B, 0x1D77},   {0x1D79, 0x1D9A},
    {0x1E00, 0x1F15},   {0x1F18, 0x1F1D},   {0x1F20, 0x1F45},   {0x1F48, 0x1F4D},   {0x1F50, 0x1F57},   {0x1F59, 0x1F59},
    {0x1F5B, 0x1F5B},   {0x1F5D, 0x1F5D},   {0x1F5F, 0x1F7D},   {0x1F80, 0x1FB4},   {0x1FB6, 0x1FBC},   {0x1FBE, 0x1FBE},
    {0x1FC2, 0x1FC4},   {0x1FC6, 0x1FCC},   {0x1FD0, 0x1FD3},   {0x1FD6, 0x1FDB},   {0x1FE0, 0x1FEC},   {0x1FF2, 0x1FF4},
    {0x1FF6, 0x1FFC},   {0x2102, 0x2102},   {0x2107, 0x2107},   {0x210A, 0x2113},   {0x2115, 0x2115},   {0x2119, 0x211D},
    {0x2124, 0x2124},   {0x2126, 0x2126},   {0x2128, 0x2128},   {0x212A, 0x212D},   {0x212F, 0x2134},   {0x2139, 0x2139},
    {0x213C, 0x213F},   {0x2145, 0x2149},   {0x214E, 0x214E},   {0x2183, 0x2183},   {0x2184, 0x2184},   {0x2C00, 0x2C7B},
    {0x2C7E, 0x2CE4},   {0x2CEB, 0x2CEE},   {0x2CF2, 0x2CF2},   {0x2CF3, 0x2CF3},   {0xA640, 0xA66D},   {0xA680, 0xA69B},
    {0xA722, 0xA76F},   {0xA771, 0xA787},   {0xA78B, 0xA78E},   {0xAB70, 0xABBF},   {0xFB00, 0xFB06},   {0xFB13, 0xFB17},
    {0xFF21, 0xFF3A},   {0xFF41, 0xFF5A},   {0x10400, 0x1044F}, {0x104B0, 0x104D3}, {0x104D8, 0x104FB}, {0x10C80, 0x10CB2},
    {0x10CC0, 0x10CF2}, {0x118A0, 0x118DF}, {0x1E900, 0x1E943}};

constexpr uint32_t kEnd = 0x110000;

std::unique_ptr<uint8_t[]> make_flag_table() {
  auto table = std::make_unique<uint8_t[]>(kEnd + 1);
  for (size_t i = 0; i < kCategoryRunsSize; ++i) {
    const uint32_t last = i + 1 < kCategoryRunsSize ? kCategoryRuns[i + 1] >> 8 : kEnd;
    for (uint32_t code = kCategoryRuns[i] >> 8; code < last; ++code) table[code] = static_cast<uint8_t>(kCategoryRuns[i] & 0xFF);
  }
  for (const auto& [first, last] : kCasedRanges)
    for (uint32_t code = first; code <= last; ++code) table[code] |= kCased;
  // NFC quick check: marks that can move, characters that never survive, characters that a starter before them may take in.
  for (size_t i = 0; i < kCombiningRunsSize; ++i) {
    const uint32_t last = i + 1 < kCombiningRunsSize ? kCombiningRuns[i + 1] >> 8 : kEnd;
    if ((kCombiningRuns[i] & 0xFF) == 0) continue;
    for (uint32_t code = kCombiningRuns[i] >> 8; code < last; ++code) table[code] |= kUnsettled;
  }
  for (size_t i = 0; i < kDecompositionsSize; i += 3) {
    const bool composes = (kDecompositions[i] >> 31) == 0;
    table[composes ? kDecompositions[i + 2] : kDecompositions[i] & 0x7FFFFFFF] |= kUnsettled;
  }
  for (uint32_t code = 0x1161; code <= 0x1175; ++code) table[code] |= kUnsettled;
  for (uint32_t code = 0x11A8; code <= 0x11C2; ++code) table[code] |= kUnsettled;
  return table;
}

struct Alphabet {
  std::array<uint16_t, 256> code{};   // byte -> code point
  std::array<int16_t, 0x180> byte{};  // code point -> byte, or -1
};

// Printable Latin-1 bytes stand for themselves; the other 68 take the code points from 0x100 in order.
Alphabet make_alphabet() {
  Alphabet alphabet;
  alphabet.byte.fill(-1);
  uint16_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    const uint16_t code = printable ? static_cast<uint16_t>(byte) : next++;
    alphabet.code[static_cast<size_t>(byte)] = code;
    alphabet.byte[code] = static_cast<int16_t>(byte);
  }
  return alphabet;
}

const Alphabet& alphabet() {
  static const Alphabet instance = make_alphabet();
  return instance;
}

}  // namespace

const uint8_t* flag_table() {
  static const std::unique_ptr<uint8_t[]> table = make_flag_table();
  return table.get();
}

Utf8State scan_utf8(const char* p, const char* end, int& size) {
  const auto at = [p](int i) { return static_cast<uint8_t>(p[i]); };
  const uint8_t lead = at(0);
  size = 1;
  if (lead < 0x80) return Utf8State::kValid;
  if (lead < 0xC2 || lead > 0xF4) return Utf8State::kInvalid;
  const int length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte's range shuts out overlong forms, surrogates and codes past U+10FFFF.
  const uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (int i = 1; i < length; ++i) {
    if (p + i == end) return Utf8State::kCut;
    if (at(i) < (i == 1 ? low : 0x80) || at(i) > (i == 1 ? high : 0xBF)) return Utf8State::kInvalid;
    size = i + 1;
  }
  return Utf8State::kValid;
}

int decode_utf8(const char* p, const char* end, uint32_t& code) {
  int size = 0;
  if (scan_utf8(p, end, size) != Utf8State::kValid) return 0;
  constexpr uint32_t kLeadMask[] = {0, 0x7F, 0x1F, 0x0F, 0x07};
  code = static_cast<uint8_t>(*p) & kLeadMask[size];
  for (int i = 1; i < size; ++i) code = code << 6 | (static_cast<uint8_t>(p[i]) & 0x3F);
  return size;
}

void append_utf8(uint32_t code, std::string& out) {
  const auto tail = [&](int shift) { out += static_cast<char>(0x80 | (code >> shift & 0x3F)); };
  if (code < 0x80) {
    out += static_cast<char>(code);
  } else if (code < 0x800) {
    out += static_cast<char>(0xC0 | code >> 6), tail(0);
  } else if (code < 0x10000) {
    out += static_cast<char>(0xE0 | code >> 12), tail(6), tail(0);
  } else {
    out += static_cast<char>(0xF0 | code >> 18), tail(12), tail(6), tail(0);
  }
}

std::string replace_invalid(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  const char* const end = text.data() + text.size();
  for (const char* p = text.data(); p < end;) {
    int size = 0;
    const bool valid = scan_utf8(p, end, size) == Utf8State::kValid;
    out.append(valid ? std::string_view(p, static_cast<size_t>(size)) : kReplacement);
    p += size;
  }
  return out;
}

std::string bytes_to_alphabet(std::string_view bytes) {
  std::string out;
  for (const char byte : bytes) append_utf8(alphabet().code[static_cast<uint8_t>(byte)], out);
  return out;
}

std::optional<std::string> alphabet_to_bytes(std::string_view text) {
  std::string out;
  const char* const end = text.data() + text.size();
  for (const char* p = text.data(); p < end;) {
    uint32_t code = 0;
    const int size = decode_utf8(p, end, code);
    if (size == 0 || code >= alphabet().byte.size() || alphabet().byte[code] < 0) return std::nullopt;
    out += static_cast<char>(alphabet().byte[code]);
    p += size;
  }
  return out;
}

}  // namespace cachalot::unicode
