// The figures of `cachalot bench` as text: llama-bench's table and key names, and more behind them.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "cli/bench_run.h"

namespace cachalot {

// What all tests of one model on one device share.
struct BenchSubject {
  std::string file, type, device;  // type: "deepseek2 15.7B Q4_K"
  double stored_bytes = 0.0, params = 0.0;
  int n_threads = 0;
  std::string kv_type;
  MachinePeaks peaks;
};

enum class BenchFormat { markdown, json, json_lines, csv };

class BenchOutput {
 public:
  explicit BenchOutput(BenchFormat format) : format_(format) {}

  void add(const BenchSubject& subject, const BenchResult& result);
  void finish();  // JSON is printed here, everything else as it comes

  // One result with llama-bench's keys, then ours.
  [[nodiscard]] static nlohmann::ordered_json record(const BenchSubject& subject, const BenchResult& result);

 private:
  void add_row(const BenchSubject& subject, const BenchResult& result);

  BenchFormat format_;
  nlohmann::ordered_json records_ = nlohmann::ordered_json::array();
  bool has_header_ = false;
};

}  // namespace cachalot
