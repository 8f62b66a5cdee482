// Operations on UTF-8 text with the meaning of Python's str: characters are code points. All text given must be valid UTF-8.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cachalot::jinja {

bool is_valid_utf8(std::string_view text);
size_t count_chars(std::string_view text);
// Byte offset of the n-th character; text.size() when there are fewer.
size_t char_offset(std::string_view text, size_t n);
// Reads the character at byte `at` and moves `at` past it.
char32_t next_char(std::string_view text, size_t& at);
void append_char(std::string& out, char32_t c);
std::u32string to_chars32(std::string_view text);

bool is_space(char32_t c);
bool is_printable(char32_t c);  // repr() shows it as it is
bool is_letter(char32_t c);
bool is_decimal(char32_t c);
bool is_upper(char32_t c);
bool is_lower(char32_t c);

std::string upper(std::string_view text);
std::string lower(std::string_view text);
std::string capitalize(std::string_view text);
std::string title(std::string_view text);         // Python's str.title: every run of letters
std::string title_filter(std::string_view text);  // the filter: words after spaces, hyphens and opening brackets
std::string swapcase(std::string_view text);

enum class Side : uint8_t { kBoth, kLeft, kRight };
// `chars` null: white space.
std::string_view strip(std::string_view text, const std::string* chars, Side side);
// Linear in the sum of the lengths. npos when absent.
size_t find(std::string_view text, std::string_view needle, size_t from = 0);
size_t rfind(std::string_view text, std::string_view needle);
size_t count(std::string_view text, std::string_view needle);
// max_splits < 0: all. `separator` null: runs of white space.
std::vector<std::string_view> split(std::string_view text, const std::string* separator, int64_t max_splits);
std::vector<std::string_view> rsplit(std::string_view text, const std::string* separator, int64_t max_splits);
std::vector<std::string_view> split_lines(std::string_view text, bool keep_ends);
std::string escape_html(std::string_view text);
std::string quote(std::string_view text);  // Python's repr() of a string

}  // namespace cachalot::jinja
