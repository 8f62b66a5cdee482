// KvLayout: the form of one layer's KV cache. Memory is pages of `block_tokens` rows; a row holds all heads of one token.
// Since rope is applied before a row is written, a row does not know its position.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/dtype.h"

namespace cachalot {

enum class KvFormat : uint8_t { f32, f16, bf16 };

constexpr DType dtype_of(KvFormat format) {
  switch (format) {
    case KvFormat::f32: return DType::f32;
    case KvFormat::f16: return DType::f16;
    case KvFormat::bf16: return DType::bf16;
  }
  return DType::f32;
}

struct KvLayout {
  int heads = 0;               // KV heads; 1 for MLA
  int k_dim = 0, v_dim = 0;    // per head; MLA: kv_lora_rank + rope_dim, and kv_lora_rank
  bool v_is_k_prefix = false;  // MLA: V is the first v_dim numbers of the K row, stored once
  KvFormat format = KvFormat::f32;
  int block_tokens = 16;  // 8, 16, 32 or 64

  [[nodiscard]] size_t k_row_bytes() const { return static_cast<size_t>(heads) * static_cast<size_t>(k_dim) * size_of(dtype_of(format)); }
  [[nodiscard]] size_t v_row_bytes() const {
    return v_is_k_prefix ? 0 : static_cast<size_t>(heads) * static_cast<size_t>(v_dim) * size_of(dtype_of(format));
  }
  [[nodiscard]] size_t token_bytes() const { return k_row_bytes() + v_row_bytes(); }  // of one token in one layer
};

// One layer's pages on the device.
struct KvLayer {
  KvLayout layout;
  void* k = nullptr;  // [n_blocks, block_tokens, heads * k_dim]
  void* v = nullptr;  // [n_blocks, block_tokens, heads * v_dim]; null when v_is_k_prefix
};

}  // namespace cachalot
