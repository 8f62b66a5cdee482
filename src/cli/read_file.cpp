// Reads by stdio, so that pipes work as files do.
#include "cli/read_file.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "base/error.h"

namespace cachalot {
namespace {

std::string read_stream(std::FILE* stream, const std::string& name, size_t limit) {
  std::string text;
  char buffer[1 << 16];
  for (;;) {
    const size_t n = std::fread(buffer, 1, sizeof buffer, stream);
    if (n == 0) break;
    if (n > limit - text.size()) fail("{}: found more than {} bytes, expected at most that", name, limit);
    text.append(buffer, n);
  }
  if (std::ferror(stream)) fail("{}: cannot read: {}", name, std::strerror(errno));
  return text;
}

}  // namespace

std::string read_input_file(const std::filesystem::path& path, size_t limit) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) fail("{}: found a directory, expected a file", path.string());
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), std::fclose);
  if (!file) fail("{}: cannot open: {}", path.string(), std::strerror(errno));
  return read_stream(file.get(), path.string(), limit);
}

std::string read_standard_input(size_t limit) { return read_stream(stdin, "standard input", limit); }

void write_out(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0)
    fail("cannot write to the standard output: {}", std::strerror(errno));
}

}  // namespace cachalot
