// Config: shared checks, and the choice between the two ways it is stored.
#include "model/config.h"

#include <cmath>

#include "base/error.h"
#include "model/config_sources.h"

namespace cachalot {

const char* name_of(Family family) {
  switch (family) {
    case Family::llama: return "llama";
    case Family::qwen2: return "qwen2";
    case Family::qwen3: return "qwen3";
    case Family::deepseek_v2: return "deepseek_v2";
    case Family::deepseek_v3: return "deepseek_v3";
  }
  return "?";
}

KvLayout Config::kv_layout(KvFormat format, int block_tokens) const {
  if (format == KvFormat::fp8 && !(mla && fp8_row_fits(kv_rank, rope.dim)))
    fail("fp8 cache rows: found {}, expected latent attention (MLA) with a latent that is a multiple of 4",
         mla ? fmt::format("a latent of {} + {}", kv_rank, rope.dim) : "a model without it");
  if (mla) return {1, kv_rank + rope.dim, kv_rank, true, format, block_tokens};
  return {n_kv_heads, head_dim, head_dim, false, format, block_tokens};
}

double yarn_magnitude(double factor, double mscale) { return factor > 1.0 ? 0.1 * mscale * std::log(factor) + 1.0 : 1.0; }

namespace {

void check_range(const std::string& file, const char* field, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) fail("{}: {} is {}, expected {} to {}", file, field, value, low, high);
}

void check_router(const Config& c, const std::string& file) {
  const Router& r = c.router;
  check_range(file, "number of experts", c.n_experts, 1, 65536);
  check_range(file, "experts used per token", r.top_k, 1, std::min(c.n_experts, 64));
  check_range(file, "expert groups", r.n_group, 1, c.n_experts);
  check_range(file, "expert groups used", r.topk_group, 1, r.n_group);
  check_range(file, "expert intermediate size", c.moe_intermediate, 1, 1 << 20);
  check_range(file, "shared experts", c.n_shared, 0, 1024);
  check_range(file, "leading dense layers", c.first_dense, 0, c.n_layers);
  if (c.n_experts % r.n_group != 0) fail("{}: {} experts do not divide into {} groups", file, c.n_experts, r.n_group);
  const int reachable = c.n_experts / r.n_group * r.topk_group;
  if (r.group_score != GroupScore::none && r.top_k > reachable)
    fail("{}: {} experts per token, but the {} chosen groups hold only {}", file, r.top_k, r.topk_group, reachable);
  if (r.group_score == GroupScore::top2_sum && c.n_experts / r.n_group < 2)
    fail("{}: groups of one expert cannot be scored by their two best", file);
}

}  // namespace

Config read_config(const Checkpoint& checkpoint) {
  Config c = checkpoint.gguf() != nullptr ? read_gguf_config(checkpoint) : read_json_config(checkpoint);
  const std::string file = checkpoint.name();
  check_range(file, "vocabulary size", c.vocab, 1, 1 << 24);
  check_range(file, "hidden size", c.hidden, 1, 1 << 20);
  check_range(file, "number of layers", c.n_layers, 1, 4096);
  check_range(file, "number of attention heads", c.n_heads, 1, 4096);
  check_range(file, "maximum positions", c.max_positions, 1, 1 << 26);
  check_range(file, "rotary dimension", c.rope.dim, 2, 4096);
  if (c.rope.dim % 2 != 0) fail("{}: rotary dimension {} is odd", file, c.rope.dim);
  if (!(c.rms_eps > 0.0f && c.rms_eps < 1.0f)) fail("{}: RMS norm epsilon is {}, expected between 0 and 1", file, c.rms_eps);
  if (!(c.rope.theta > 1.0) || !std::isfinite(c.rope.theta)) fail("{}: rope theta is {}, expected above 1", file, c.rope.theta);
  if (!(c.rope.factor >= 1.0) || !std::isfinite(c.rope.factor))
    fail("{}: rope scaling factor is {}, expected at least 1", file, c.rope.factor);
  if (c.rope.scaling == RopeConfig::Scaling::yarn || c.rope.scaling == RopeConfig::Scaling::llama3)
    check_range(file, "original context length of the rope scaling", c.rope.original_positions, 1, 1 << 26);
  if (c.mla) {
    check_range(file, "kv_lora_rank", c.kv_rank, 1, 1 << 16);
    check_range(file, "q_lora_rank", c.q_rank, 0, 1 << 16);
    check_range(file, "qk_nope_head_dim", c.nope, 1, 4096);
    check_range(file, "v_head_dim", c.v_dim, 1, 4096);
  } else {
    check_range(file, "number of key-value heads", c.n_kv_heads, 1, c.n_heads);
    check_range(file, "head dimension", c.head_dim, 2, 4096);
    if (c.n_heads % c.n_kv_heads != 0) fail("{}: {} attention heads do not divide into {} key-value heads", file, c.n_heads, c.n_kv_heads);
    if (c.rope.dim > c.head_dim) fail("{}: rotary dimension {} exceeds the head dimension {}", file, c.rope.dim, c.head_dim);
  }
  check_range(file, "number of experts", c.n_experts, 0, 65536);
  if (c.n_experts == 0 || c.first_dense > 0) check_range(file, "intermediate size", c.intermediate, 1, 1 << 24);
  if (c.n_experts > 0) check_router(c, file);
  if (c.n_mtp_layers != 0) check_range(file, "multi-token-prediction layers", c.n_mtp_layers, 0, 64);
  for (const int id : c.eos_ids) check_range(file, "end-of-text token id", id, 0, c.vocab - 1);
  return c;
}

}  // namespace cachalot
