// CACHALOT_CHECK: an invariant of our own code, tested in every build. A user's input must never reach a failing one.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace cachalot::detail {

[[noreturn]] inline void check_failed(const char* file, int line, const char* condition, const std::string& why) {
  std::fprintf(stderr, "%s:%d: check failed: %s%s%s\n", file, line, condition, why.empty() ? "" : ": ", why.c_str());
  std::abort();
}
inline std::string check_text() { return {}; }
template <typename... Args>
std::string check_text(fmt::format_string<Args...> format, Args&&... args) {
  return fmt::format(format, std::forward<Args>(args)...);
}

}  // namespace cachalot::detail

// CACHALOT_CHECK(condition) or CACHALOT_CHECK(condition, "format {}", values...)
#define CACHALOT_CHECK(condition, ...)                                                                               \
  do {                                                                                                               \
    if (!(condition)) [[unlikely]]                                                                                   \
      ::cachalot::detail::check_failed(__FILE__, __LINE__, #condition, ::cachalot::detail::check_text(__VA_ARGS__)); \
  } while (false)
