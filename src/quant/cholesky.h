// Cholesky factors, and systems with them, on the products of an Ops.
#pragma once

#include <span>

#include "base/thread_pool.h"
#include "ops/ops.h"

namespace cachalot {

// Lower triangular L with a = L L^T for symmetric positive definite a [n, n], of which the lower triangle is read, in place (the upper part
// becomes zero). False when a is not positive definite.
bool cholesky(Ops& ops, std::span<float> a, int n);

// Columns of a matrix whose rows are padded, so that they go through lanes.
size_t padded_to_lanes(int columns);

enum class Triangle : uint8_t { lower, transposed };  // L, L^T
// Solves L y = z or L^T y = z in place for `columns` right-hand sides: z [n, padded_to_lanes(columns)], padding finite.
void solve(Ops& ops, ThreadPool& pool, std::span<const float> lower, int n, Triangle triangle, std::span<float> z, int columns);

}  // namespace cachalot
