# Unpacks testdata/*.tar.xz (and CACHALOT_EXTRA_DATA/tokenizers.tar.xz) into the build folder when an archive is newer than its stamp.
# Tests find the result through CACHALOT_TESTDATA.

set(CACHALOT_TESTDATA_DIR ${CMAKE_BINARY_DIR}/testdata)
function(cachalot_unpack archive)
  get_filename_component(name ${archive} NAME)
  set(stamp ${CACHALOT_TESTDATA_DIR}/.${name}.stamp)
  if(NOT EXISTS ${stamp} OR ${archive} IS_NEWER_THAN ${stamp})
    message(STATUS "Unpacking ${name}")
    file(ARCHIVE_EXTRACT INPUT ${archive} DESTINATION ${CACHALOT_TESTDATA_DIR})
    file(TOUCH ${stamp})
  endif()
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${archive})
endfunction()

file(GLOB archives ${CMAKE_SOURCE_DIR}/testdata/*.tar.xz)
foreach(archive IN LISTS archives)
  cachalot_unpack(${archive})
endforeach()
if(CACHALOT_EXTRA_DATA AND EXISTS ${CACHALOT_EXTRA_DATA}/tokenizers.tar.xz)
  file(ARCHIVE_EXTRACT INPUT ${CACHALOT_EXTRA_DATA}/tokenizers.tar.xz DESTINATION ${CACHALOT_TESTDATA_DIR}
    PATTERNS "*llama3/*" "*deepseek-coder*")
endif()
