// The three matrices that both forms of latent attention need, from whichever of them a file holds.
#pragma once

#include <string>

#include "io/checkpoint.h"
#include "ops/ops.h"

namespace cachalot {

struct MlaSources {
  LinearSource kv_b;  // [H * (nope + v_dim), kv_rank]
  LinearSource uk_t;  // H matrices [kv_rank, nope]
  LinearSource uv;    // H matrices [v_dim, kv_rank]
};

// Reads attn_kv_b, or attn_k_b and attn_v_b, or all three, and derives what is missing. Derived matrices keep the stored format where that
// is f32, f16 or bf16; from a quantized one they become f16 (or f32 when `exact`), since a transposed row no longer fits its blocks.
// Derived ones have the name that GGUF gives them.
MlaSources mla_sources(const Checkpoint& file, const std::string& prefix, const MlaDims& dims, bool exact);

}  // namespace cachalot
