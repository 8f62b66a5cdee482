// Recipe: what becomes of each matrix of a model, decided by name before any work: method, scheme, exceptions, and the fallback where a
// width does not divide.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "model/config.h"
#include "quant/gptq.h"
#include "quant/scheme.h"

namespace cachalot {

class ImportanceMatrix;  // quant/imatrix.h

enum class Method : uint8_t { rtn, awq, gptq, awq_gptq };
const char* name_of(Method method);

// A glob over GGUF names ("blk.*.attn_kv_b.weight") and what its tensors become; the first that matches wins.
struct SchemeRule {
  std::string pattern;
  Scheme scheme;
};

struct Recipe {
  Method method = Method::rtn;
  Scheme scheme{Format::int4_planar, 128, false};
  std::vector<SchemeRule> rules;                    // before `scheme`
  std::map<std::string, Scheme> exact;              // before the rules: what a search decided
  RangeSearch search = RangeSearch::fit;            // of planar groups
  bool importance = true;                           // weigh errors of block formats by the inputs' mean squares
  std::shared_ptr<const ImportanceMatrix> imatrix;  // where these come from, if not from the calibration text
  GptqOptions gptq;
  bool meet_earlier_errors =
      true;                      // AWQ, GPTQ: aim at the unquantized model's outputs, on the inputs that the quantized layers before give
  bool split_kv_b = false;       // GGUF: kv_b as transposed per-head k_b, kept at 8 bits or more, and v_b
  int min_expert_tokens = 256;   // an expert that fewer calibration tokens reach is starved: others fill it up
  bool all_experts = false;      // calibrate every expert on every token
  float unrouted_weight = 0.1f;  // of tokens that an expert would not see, as a share of the mean routing weight

  [[nodiscard]] bool uses_gptq() const { return method == Method::gptq || method == Method::awq_gptq; }
  [[nodiscard]] bool uses_awq() const { return method == Method::awq || method == Method::awq_gptq; }
};

// One matrix, or stack of them, of the model.
struct ModelMatrix {
  std::string name;  // GGUF's
  int n_matrices = 1, out = 0, in = 0;
  [[nodiscard]] int64_t n_weights() const { return int64_t{n_matrices} * out * in; }
};
// All matrices in the order of a GGUF file: embedding, head (absent when tied), then layer by layer. Norms, biases and the router, which
// are never quantized, are not among them. split_kv_b: attn_k_b and attn_v_b in place of attn_kv_b.
std::vector<ModelMatrix> model_matrices(const Config& config, bool split_kv_b);

struct PlannedMatrix {
  ModelMatrix matrix;
  Scheme wanted, scheme;  // by the recipe; and what fits
  [[nodiscard]] bool fell_back() const { return !(wanted == scheme); }
};
// Embedding and head become what a rule or `exact` says, else bf16; k_b becomes q8_0 unless a rule asks for more.
std::vector<PlannedMatrix> plan(const Recipe& recipe, const Config& config);

// Whether a glob of '*' and '?' matches the whole text.
bool glob_matches(std::string_view pattern, std::string_view text);

// Bits of all weights of the planned matrices over their number; `linears_only` leaves out embedding and head.
double mean_bits(const std::vector<PlannedMatrix>& planned, bool linears_only);

}  // namespace cachalot
