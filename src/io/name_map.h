// Names: from Hugging Face tensor names of the supported families (llama, qwen2, qwen3, deepseek_v2, deepseek_v3) to GGUF's.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace cachalot {

struct MappedName {
  std::string canonical;  // "blk.3.ffn_gate_exps.weight"
  int expert = -1;        // which matrix of the stack; -1 when the tensor is the whole
};

// "model.layers.3.self_attn.q_proj.weight" -> "blk.3.attn_q.weight". The leading "model." may be absent. Nothing for other names.
std::optional<MappedName> map_hf_name(std::string_view name);

// The other way, for messages: the name of the tensor (or of one expert's) that a checkpoint should have; "" for GGUF-only names.
std::string hf_name_of(std::string_view canonical, int expert = -1);

// Is it one of the GGUF names that some supported family has?
bool is_canonical_name(std::string_view name);

}  // namespace cachalot
