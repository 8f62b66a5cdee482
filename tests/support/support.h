// What tests of every folder share: where the unpacked test data is, temporary folders, seeded random numbers, expected errors.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"

namespace cachalot::test {

// <build>/testdata/<name>. The file or folder is there when its archive is part of the repository.
std::filesystem::path testdata(const std::string& name);
// <source>/<name>.
std::filesystem::path source_file(const std::string& name);

// A fresh folder, removed with its content when the object goes.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  // Writes `content` to <folder>/<name> and returns the path.
  [[nodiscard]] std::filesystem::path write(const std::string& name, std::string_view content) const;

 private:
  std::filesystem::path path_;
};

// n normally distributed values times `scale`, the same for equal seeds.
std::vector<float> random_floats(size_t n, uint64_t seed, float scale = 1.0f);

// The text of the Error that `f` throws; a test failure and "" when it throws none.
template <typename F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "no Error was thrown";
  return {};
}

}  // namespace cachalot::test
