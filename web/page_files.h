// The files of the page, which the build puts into the binary.
#pragma once

#include <span>
#include <string_view>

namespace cachalot::web {

struct PageFile {
  std::string_view path;  // "/main.js"
  std::string_view bytes, content_type;
};
std::span<const PageFile> page_files();

}  // namespace cachalot::web
