// UTF-8 and Unicode character classes for text that may hold invalid bytes, the byte alphabet of byte-level BPE, and NFC.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace cachalot::unicode {

// Character class flags. kCased is the explicit list of letters in the pre-tokenizer of DeepSeek-LLM and V2.
enum Flag : uint8_t {
  kLetter = 1,
  kMark = 2,
  kNumber = 4,
  kPunctuation = 8,
  kSymbol = 16,
  kSpace = 32,  // White_Space
  kCased = 64,
  kUnsettled = 128,  // may change, or move, under NFC
};

constexpr uint32_t kInvalidByte = 0x110000;  // the code of a byte that is not part of well-formed UTF-8
constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

// One character, or one invalid byte (code kInvalidByte, no flags, size 1).
struct Char {
  uint32_t code;
  uint8_t flags;
  uint8_t size;  // bytes, at least 1
};

// Flags by code point, 0x110001 entries (the last is kInvalidByte). Built at the first call; then free to share between threads.
const uint8_t* flag_table();

// Length of the well-formed character at p (1 to 4), with its code; 0 when the bytes there are not one. p < end.
int decode_utf8(const char* p, const char* end, uint32_t& code);
// How the bytes at p begin: a whole character (valid), a beginning that more bytes could complete (cut by `end`), or neither.
// `size` is the number of bytes that belong together: the character, or the maximal subpart that one U+FFFD replaces.
enum class Utf8State { kValid, kCut, kInvalid };
Utf8State scan_utf8(const char* p, const char* end, int& size);

inline Char char_at(const char* p, const char* end, const uint8_t* table) {
  const auto byte = static_cast<uint8_t>(*p);
  if (byte < 0x80) return {byte, table[byte], 1};
  uint32_t code = 0;
  const int size = decode_utf8(p, end, code);
  if (size == 0) return {kInvalidByte, 0, 1};
  return {code, table[code], static_cast<uint8_t>(size)};
}

void append_utf8(uint32_t code, std::string& out);
// Each maximal invalid part becomes one U+FFFD, as Unicode recommends and Python's errors='replace' does.
std::string replace_invalid(std::string_view text);

// Canonical composition. Invalid bytes stay as they are and act as starters. Linear but for sorting runs of marks.
bool is_surely_nfc(std::string_view text);
std::string nfc(std::string_view text);

// GPT-2's alphabet: each byte as one printable character. to_bytes gives nothing when a character lies outside of it.
std::string bytes_to_alphabet(std::string_view bytes);
std::optional<std::string> alphabet_to_bytes(std::string_view text);

}  // namespace cachalot::unicode
