// The table of `eval compare`: schemes of one model side by side, as Markdown, JSON and a picture.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace cachalot {

struct ComparedDomain {
  std::string domain;
  int64_t tokens = 0;
  double ppl = 0.0, ppl_ratio = 0.0, kl = 0.0, kl_error = 0.0, kl_p99 = 0.0, top1 = 0.0;
};

struct ComparedModel {
  std::string name, path, type;  // type: the format with the most bytes
  double file_bytes = 0.0;       // of all its files
  double memory_bytes = 0.0;     // of the weights on the device
  double bits_per_weight = 0.0;
  double ttft_seconds = 0.0, prefill_rate = 0.0, decode_rate = 0.0;  // tokens per second; 0 when speed was not measured
  ComparedDomain all;
  std::vector<ComparedDomain> domains;
  bool is_base = false;
};

struct Comparison {
  std::string base, method, device;
  int prompt = 0, generated = 0, threads = 0;  // tokens of the speed test
  std::vector<ComparedModel> models;           // the base model first
};

std::string comparison_markdown(const Comparison& c);
nlohmann::ordered_json comparison_json(const Comparison& c);
// Size of the file against mean KL divergence (logarithmic). Colours follow the reader's light or dark scheme.
std::string comparison_svg(const Comparison& c);

}  // namespace cachalot
