// RegexSplitter on PCRE2.
#include "text/regex_splitter.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <array>
#include <chrono>
#include <memory>

#include "base/check.h"
#include "base/error.h"
#include "text/unicode.h"

namespace cachalot {
namespace {

constexpr size_t kMaxPattern = 64u << 10;    // bytes
constexpr uint32_t kMatchLimit = 2'000'000;  // backtracking steps of one call
constexpr uint32_t kHeapLimit = 32u << 10;   // KiB
constexpr size_t kStartWindow = 64;          // start positions that one call may try: each has its own match limit, and the clock waits
constexpr std::chrono::milliseconds kTimeBase{1000};
constexpr std::chrono::nanoseconds kTimePerByte{2000};

template <auto kFree>
struct Freed {
  template <typename T>
  void operator()(T* p) const {
    kFree(p);
  }
};
using CompileContext = std::unique_ptr<pcre2_compile_context, Freed<pcre2_compile_context_free>>;
using MatchContext = std::unique_ptr<pcre2_match_context, Freed<pcre2_match_context_free>>;
using MatchData = std::unique_ptr<pcre2_match_data, Freed<pcre2_match_data_free>>;

std::string reason(int error) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(error, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

}  // namespace

RegexSplitter::RegexSplitter(SplitStep step, std::string where) : step_(std::move(step)), where_(std::move(where)) {
  if (step_.regex.empty() || step_.regex.size() > kMaxPattern)
    fail("{}: found a pattern of {} bytes, expected 1 to {}", where_, step_.regex.size(), kMaxPattern);
  const CompileContext context(pcre2_compile_context_create(nullptr));
  CACHALOT_CHECK(context != nullptr);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  uint32_t options = PCRE2_UTF | PCRE2_MATCH_INVALID_UTF | PCRE2_USE_OFFSET_LIMIT;
  options |= step_.literal ? PCRE2_LITERAL : PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C;
  int error = 0;
  PCRE2_SIZE offset = 0;
  code_ = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(step_.regex.data()), step_.regex.size(), options, &error, &offset, context.get());
  if (code_ == nullptr)
    fail("{}: found the pattern \"{}\", expected a valid regular expression: {} at byte {}", where_, printable(step_.regex), reason(error),
         offset);
  // Without JIT memory the interpreter does the same work, slower.
  (void)pcre2_jit_compile(code_, PCRE2_JIT_COMPLETE);
}

RegexSplitter::~RegexSplitter() { pcre2_code_free(code_); }

void RegexSplitter::split(std::string_view text, const std::function<void(std::string_view)>& sink) const {
  const MatchContext context(pcre2_match_context_create(nullptr));
  const MatchData data(pcre2_match_data_create_from_pattern(code_, nullptr));
  CACHALOT_CHECK(context != nullptr && data != nullptr);
  pcre2_set_match_limit(context.get(), kMatchLimit);
  pcre2_set_heap_limit(context.get(), kHeapLimit);
  const auto deadline = std::chrono::steady_clock::now() + kTimeBase + kTimePerByte * static_cast<int64_t>(text.size());

  const auto emit = [&](size_t from, size_t to, bool is_match) {
    if (from < to && !(step_.remove_matches && is_match != step_.invert)) sink(text.substr(from, to - from));
  };
  size_t gap = 0, at = 0;
  while (at < text.size()) {
    const size_t last_start = std::min(text.size(), at + kStartWindow);
    pcre2_set_offset_limit(context.get(), last_start);
    const int result = pcre2_match(code_, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), at, 0, data.get(), context.get());
    if (result == PCRE2_ERROR_NOMATCH) {
      at = last_start + 1;
      // The next start must not lie inside a character.
      while (at < text.size() && (static_cast<uint8_t>(text[at]) & 0xC0) == 0x80) ++at;
    } else if (result < 0) {
      fail("{}: the pattern \"{}\" gave up at byte {} of the text: {}", where_, printable(step_.regex), at, reason(result));
    } else {
      const PCRE2_SIZE* const range = pcre2_get_ovector_pointer(data.get());
      if (range[1] <= range[0]) {
        const uint8_t* const table = unicode::flag_table();
        if (range[0] >= text.size()) break;
        at = range[0] + unicode::char_at(text.data() + range[0], text.data() + text.size(), table).size;
      } else {
        emit(gap, range[0], false);
        emit(range[0], range[1], true);
        gap = at = range[1];
      }
    }
    if (std::chrono::steady_clock::now() > deadline)
      fail("{}: the pattern \"{}\" ran out of time at byte {} of {}", where_, printable(step_.regex), at, text.size());
  }
  emit(gap, text.size(), false);
}

}  // namespace cachalot
