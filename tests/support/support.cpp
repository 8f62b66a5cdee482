// Implementation of the helpers that tests share.
#include "support/support.h"

#include <unistd.h>

#include <atomic>
#include <fstream>

namespace cachalot::test {
namespace fs = std::filesystem;

fs::path testdata(const std::string& name) { return fs::path(CACHALOT_TESTDATA_DIR) / name; }
fs::path source_file(const std::string& name) { return fs::path(CACHALOT_SOURCE_DIR) / name; }

TempDir::TempDir() {
  static std::atomic<int> counter{0};
  path_ = fs::temp_directory_path() / fmt::format("cachalot-test-{}-{}", ::getpid(), counter++);
  fs::create_directories(path_);
}
TempDir::~TempDir() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}
fs::path TempDir::write(const std::string& name, std::string_view content) const {
  const fs::path path = path_ / name;
  std::ofstream out(path, std::ios::binary);
  out.write(content.data(), static_cast<std::streamsize>(content.size()));
  return path;
}

std::vector<float> random_floats(size_t n, uint64_t seed, float scale) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> out(n);
  for (float& value : out) value = normal(engine);
  return out;
}

}  // namespace cachalot::test
