// The golden checkpoints: tiny models of each family with reference logits, hidden states and a greedy continuation (see
// testdata/SOURCES.md).
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "cachalot/engine.h"
#include "model/decoder.h"
#include "ops/hybrid_ops.h"

namespace cachalot::test {

struct Golden {
  int n_tokens = 0, vocab = 0, n_hidden = 0, hidden_size = 0;
  std::vector<int> input_ids;  // [n_tokens]
  std::vector<float> logits;   // [n_tokens, vocab]
  std::vector<float> hidden;   // [n_layers + 1, n_tokens, hidden]: the residual stream before each layer, and after the last
  std::vector<int> greedy;     // 16 prompt ids, then 24 generated
};
Golden read_golden(const std::filesystem::path& folder);

// Every family but V3.2, which is refused.
const std::vector<std::string>& golden_models();

// A model loaded on an Ops.
struct TestModel {
  std::unique_ptr<Ops> ops;
  Config config;
  Decoder decoder;
};
TestModel load_model(const std::filesystem::path& path, std::unique_ptr<Ops> ops, bool exact_derived = false);
// With the routed experts of layers below n_host_experts on the host.
TestModel load_model(const std::filesystem::path& path, std::unique_ptr<HybridOps> ops, int n_host_experts);

// Logits [n, vocab] of all positions of `ids`, run in chunks.
struct RunOptions {
  int chunk = 1 << 20, block_tokens = 16;
  int form = 0;  // MlaForm as int
  KvFormat kv_format = KvFormat::f32;
};
std::vector<float> run_logits(TestModel& model, const std::vector<int>& ids, const RunOptions& options = {});

// Prompts and what the engine adds to them greedily, up to n tokens, end tokens ignored.
std::vector<std::vector<int>> greedy_texts(const TestModel& model, const std::vector<std::vector<int>>& prompts, int n,
                                           const EngineOptions& options);

float max_abs(const std::vector<float>& values);
float max_abs_difference(const std::vector<float>& a, const std::vector<float>& b);

}  // namespace cachalot::test
