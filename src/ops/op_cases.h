// The one list of operation cases. Tests run each on a backend and on RefOps and compare; benchmarks run the same closures for their time.
// Inputs are seeded by the case's name and rounded to the candidate's activation dtype on both sides, so that only arithmetic differs.
//
// A backend's test:
//   for (const OpCase& c : op_cases({.without_ops = {"kv_gather"}})) {
//     const CaseResult r = run_case(c, *candidate, *reference, {.activations_in_16_bits = true});
//     EXPECT_TRUE(r.ok) << r.text;
//   }
// A benchmark:  auto instance = c.prepare(ops, ops.activation()); for (...) instance.call();
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ops/case_tensor.h"
#include "ops/ops.h"
#include "ops/random_weights.h"

namespace cachalot::test {

// One array that a case's operation writes.
struct CaseOutput {
  std::string name;
  std::shared_ptr<CaseTensor> tensor;
  bool exact = false;  // must equal the reference in every element
};

// A case with its inputs on one device.
struct CaseInstance {
  std::function<void()> call;  // runs the operation once; may be repeated, though in-place results then change
  std::vector<CaseOutput> outputs;
  std::vector<std::shared_ptr<void>> keep;  // what the call refers to
};

struct OpCase {
  std::string name;         // "linear/q4_k/96x512/T7": the operation, then what it is run on
  std::string op;           // "linear"
  bool quantised = false;   // has weights in a block format, for which a backend may quantise activations
  bool bf16_cache = false;  // attends rows of bf16 or fp8, to which a backend may round queries and weights too
  double slack = 1.0;       // factor on the tolerance, for ill-conditioned inputs
  double bytes = 0.0;       // that one call must move at least: weights, inputs and outputs once (benchmarks)
  double flops = 0.0;
  // Uploads the inputs, rounded to `rounding`; activations are held in ops.activation().
  std::function<CaseInstance(Ops& ops, DType rounding)> prepare;
};

struct CaseFilter {
  std::string_view contains;                    // part of the name; "" takes all
  std::vector<std::string> without_ops = {};    // operations left out
  std::vector<std::string> without_names = {};  // cases whose names contain one of these are left out
};
std::vector<OpCase> op_cases(const CaseFilter& filter = {});

struct CaseOptions {
  bool activations_in_16_bits = false;  // rounded so in linear maps whose weights are in a block format
  bool bf16_products = false;           // both operands of linear maps rounded to bf16
  bool fp8_activations = false;         // of linear maps whose weights are in a block format, in blocks of 128
  bool bf16_attention = false;          // rounds queries and softmax weights to bf16 when the cache is in bf16
};

struct CaseResult {
  bool ok = false;
  double max_error = 0.0;  // largest |candidate - reference|
  double relative = 0.0;   // largest |candidate - reference| / (rms(reference) + |reference|)
  double nmse = 0.0;       // sum of squared errors / sum of squared references
  double tolerance = 0.0;  // on `relative`: a few units of the activation dtype
  double nmse_limit = 0.0;
  std::string text;  // the case's name, these numbers, and what went wrong
};
CaseResult run_case(const OpCase& c, Ops& candidate, Ops& reference, const CaseOptions& options = {});

// ---- builders, for benchmarks of other sizes ----
struct LinearCase {
  std::vector<WeightShape> segments;  // one, or several of the same input
  int rows = 1;                       // T
  float beta = 0.0f;
  bool f32_out = false;  // y in f32 rather than in the activation dtype
  bool strided = false;  // x and y are columns of wider arrays
};
OpCase linear_case(const LinearCase& shape);
OpCase swiglu_case(const WeightShape& gate_up, int rows);
OpCase ffn_case(const WeightShape& gate_up, int rows);

struct SequenceShape {
  int n_q = 1, kv_len = 1;  // kv_len 0: padding
};
struct AttentionCase {
  std::string label;
  int heads = 1;  // of the query
  KvLayout layout;
  std::vector<SequenceShape> sequences;  // of the batch
  int first = 0, count = -1;             // the sequences that are attended; -1: all from `first`
  float query_scale = 1.0f;
};
OpCase attend_case(const AttentionCase& shape);
OpCase attend_expanded_case(const AttentionCase& shape, const MlaDims& dims, Format kv_b);

struct MoeCase {
  std::string label;
  Format gate_up = Format::f32, down = Format::f32, shared = Format::f32;
  std::optional<Format> shared_down = std::nullopt;                         // where it is not `shared`
  int n_experts = 8, top_k = 2, hidden = 64, inner = 32, shared_inner = 0;  // shared_inner 0: no shared expert
  int rows = 1;
  int all_to = -1;        // this expert is among every row's choice
  bool add_norm = false;  // moe_add_rmsnorm
  float x_scale = 1.0f;
};
OpCase moe_case(const MoeCase& shape);

// The parts of the list, one function per file.
void add_row_cases(std::vector<OpCase>& cases);        // embed, norms, rope, gather_rows, scatter_add_rows
void add_linear_cases(std::vector<OpCase>& cases);     // linear, linear_swiglu, swiglu_ffn, head_linear
void add_attention_cases(std::vector<OpCase>& cases);  // kv_write, mla_prologue, kv_gather, attend, attend_expanded
void add_moe_cases(std::vector<OpCase>& cases);        // route, moe, sample

}  // namespace cachalot::test
