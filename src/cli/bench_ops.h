// `cachalot bench ops`: the time of each operation and its share of the machine's peaks, from the case list that the tests run.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cli/bench_peaks.h"
#include "ops/op_cases.h"

namespace cachalot {

// Sizes of real models: linear maps of each format for 1, 4 and 128 rows, attention and experts in the shape of DeepSeek-V2-Lite.
std::vector<test::OpCase> bench_cases();

struct OpFigure {
  std::string name;
  double seconds = 0.0, bytes = 0.0, flops = 0.0;  // of one call
};

// Runs one case; weights are held in as many copies as it takes to be larger than any cache, so that bytes per second means memory.
OpFigure time_case(Ops& ops, const test::OpCase& c);

// Those whose name contains `filter`.
std::vector<test::OpCase> chosen_cases(std::vector<test::OpCase> cases, std::string_view filter);

// Runs the cases and prints a table to the standard output.
void print_op_table(Ops& ops, const MachinePeaks& peaks, const std::vector<test::OpCase>& cases);

}  // namespace cachalot
