# Writes a C++ source that holds files as bytes. Run with -DFOLDER=, -DFILES=a;b, -DOUTPUT=, -P.
set(types ".html=text/html" ".css=text/css" ".js=text/javascript" ".svg=image/svg+xml")
set(arrays "")
set(table "")
set(n 0)
foreach(file IN LISTS FILES)
  file(READ ${FOLDER}/${file} hex HEX)
  string(LENGTH "${hex}" digits)
  math(EXPR size "${digits} / 2")
  string(REGEX REPLACE "(..)" "0x\\1," bytes "${hex}")
  get_filename_component(extension ${file} LAST_EXT)
  set(content_type "application/octet-stream")
  foreach(type IN LISTS types)
    if(type MATCHES "^\\${extension}=(.*)$")
      set(content_type "${CMAKE_MATCH_1}")
    endif()
  endforeach()
  if(NOT extension STREQUAL ".svg")
    string(APPEND content_type "; charset=utf-8")
  endif()
  string(APPEND arrays "constexpr unsigned char kFile${n}[] = {${bytes}};\n")
  string(APPEND table "      {\"/${file}\", {reinterpret_cast<const char*>(kFile${n}), ${size}}, \"${content_type}\"},\n")
  math(EXPR n "${n} + 1")
endforeach()
file(WRITE ${OUTPUT} "// Made by cmake/embed_page.cmake.
#include \"web/page_files.h\"

namespace cachalot::web {
namespace {

${arrays}
}  // namespace

std::span<const PageFile> page_files() {
  static const PageFile files[] = {
${table}  };
  return files;
}

}  // namespace cachalot::web
")
