# Compiler settings shared by every target, and the function that makes one library per folder.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
  set(CMAKE_C_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()

add_library(cachalot_options INTERFACE)
target_include_directories(cachalot_options INTERFACE ${CMAKE_SOURCE_DIR}/include ${CMAKE_SOURCE_DIR}/src)
target_compile_options(cachalot_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Werror -Wshadow -Wno-missing-field-initializers>
  # GCC 12 warns of overlapping copies inside std::string's own operator+ (GCC bug 105651).
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-restrict>
  # Sums must not depend on where the compiler fuses: contraction is written out where it is wanted.
  $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)
if(CACHALOT_SANITIZE)
  target_compile_options(cachalot_options INTERFACE -fsanitize=${CACHALOT_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all
    $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)  # which their checks make GCC say of boost::optional
  target_link_options(cachalot_options INTERFACE -fsanitize=${CACHALOT_SANITIZE})
endif()
if(CACHALOT_FUZZ)
  target_compile_options(cachalot_options INTERFACE -fsanitize=fuzzer-no-link)
endif()

# cachalot_library(<folder> SOURCES <files> DEPS <targets>): static library cachalot_<folder>.
function(cachalot_library folder)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_library(cachalot_${folder} STATIC ${ARG_SOURCES})
  target_link_libraries(cachalot_${folder} PUBLIC cachalot_options ${ARG_DEPS})
endfunction()

# cachalot_test(<name> SOURCES <files> DEPS <targets>): a GoogleTest executable test_<name>, one CTest entry per case.
function(cachalot_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SOURCES;DEPS;ENVIRONMENT" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  add_executable(test_${name} ${ARG_SOURCES})
  target_link_libraries(test_${name} PRIVATE ${ARG_DEPS} cachalot_test_support GTest::gtest GTest::gmock GTest::gtest_main)
  gtest_discover_tests(test_${name} TEST_PREFIX "${name}/" DISCOVERY_MODE PRE_TEST
    PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS ${name} ENVIRONMENT "${ARG_ENVIRONMENT}")
endfunction()

# Sets CACHALOT_HAVE_CUDA and enables the language when the toolkit is present and wanted.
macro(cachalot_detect_cuda)
  set(CACHALOT_HAVE_CUDA OFF)
  if(NOT CACHALOT_CUDA STREQUAL "OFF")
    include(CheckLanguage)
    find_program(CACHALOT_NVCC nvcc HINTS /usr/local/cuda/bin $ENV{CUDA_HOME}/bin)
    if(CACHALOT_NVCC)
      set(CMAKE_CUDA_COMPILER ${CACHALOT_NVCC})
      check_language(CUDA)
    endif()
    if(CMAKE_CUDA_COMPILER)
      if(NOT CMAKE_CUDA_ARCHITECTURES)
        set(CMAKE_CUDA_ARCHITECTURES 80-real 89-real 90a)
      endif()
      enable_language(CUDA)
      find_package(CUDAToolkit REQUIRED)
      set(CACHALOT_HAVE_CUDA ON)
    elseif(CACHALOT_CUDA STREQUAL "ON")
      message(FATAL_ERROR "CACHALOT_CUDA=ON but no nvcc was found")
    endif()
  endif()
endmacro()
