// The generated tables of unicode_tables.cpp; unicode.cpp expands them once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cachalot::unicode {

extern const uint32_t kCategoryRuns[];
extern const size_t kCategoryRunsSize;
extern const uint32_t kCombiningRuns[];
extern const size_t kCombiningRunsSize;
extern const uint32_t kDecompositions[];
extern const size_t kDecompositionsSize;

}  // namespace cachalot::unicode
