// What is wrong with a command line, in words.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace cachalot {

// The candidate that a typing error or two away may have been meant; empty when none is near.
std::string nearest_word(std::string_view word, const std::vector<std::string>& candidates);

// "no command "rn"; did you mean "run"?"
std::string unknown_command(const CLI::App& app, std::string_view name);

// In one line.
std::string usage_error_text(const CLI::App& app, const CLI::ParseError& error);

// The command that was named, for "see ... --help".
std::string command_name(const CLI::App& app);

}  // namespace cachalot
