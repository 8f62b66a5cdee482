// Error: bad input from outside (a file, a request, a flag). Its text names what was read, what was found and what was expected.
// It is thrown where the input is read and caught at the edge (cli, server). Broken invariants of our own code are CACHALOT_CHECKs.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace cachalot {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(fmt::format(format, std::forward<Args>(args)...));
}

// Text of untrusted origin, made fit to print in one line: control characters and bytes that are no UTF-8 escaped, cut to `limit` bytes and
// "..." behind them.
std::string printable(std::string_view text, size_t limit = 80);

}  // namespace cachalot
