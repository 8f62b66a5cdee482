# cmake -DSOURCE=<repository> -DOUT=<file> -P BuildCommit.cmake: writes the body of build_commit() in C++, when the commit has changed.
# A copy without git says "unknown"; "+" behind a commit says that files differ from it.
set(commit "unknown")
set(number 0)
find_program(GIT git)
if(GIT)
  execute_process(COMMAND ${GIT} -C ${SOURCE} rev-parse --short=9 HEAD OUTPUT_VARIABLE found RESULT_VARIABLE failed
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(NOT failed)
    set(commit "${found}")
    execute_process(COMMAND ${GIT} -C ${SOURCE} rev-list --count HEAD OUTPUT_VARIABLE number OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    execute_process(COMMAND ${GIT} -C ${SOURCE} diff --quiet HEAD RESULT_VARIABLE differs ERROR_QUIET)
    if(differs)
      string(APPEND commit "+")
    endif()
  endif()
endif()
set(text "// Written by cmake/BuildCommit.cmake.
#include \"cli/build_commit.h\"

namespace cachalot {

BuildCommit build_commit() { return {\"${commit}\", ${number}}; }

}  // namespace cachalot
")
if(EXISTS ${OUT})
  file(READ ${OUT} old)
endif()
if(NOT "${old}" STREQUAL "${text}")
  file(WRITE ${OUT} "${text}")
endif()
