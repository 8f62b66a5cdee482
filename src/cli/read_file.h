// Reading text that a person named on the command line: whole files and the standard input, with a limit on their size.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

namespace cachalot {

// Throws Error for a missing or unreadable file, for a directory, and for more than `limit` bytes.
std::string read_input_file(const std::filesystem::path& path, size_t limit);
std::string read_standard_input(size_t limit);

// Writes to the standard output; throws Error when it cannot.
void write_out(std::string_view text);

}  // namespace cachalot
