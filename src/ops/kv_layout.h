// KvLayout: the form of one layer's KV cache. Memory is pages of `block_tokens` rows; a row holds all heads of one token.
// Since rope is applied before a row is written, a row does not know its position.
//
// An fp8 row is for latent attention only. Its kv_rank latent numbers are E4M3 codes in groups of 128 (the last may be shorter), each group
// with its own scale; the rope key stays bf16, since its errors turn every score. In bytes: kv_rank codes, ceil(kv_rank / 128) f32 scales,
// rope_dim bf16: 656 for DeepSeek's 512 + 64, the layout that FlashMLA reads. ops/kv_codec.h has the arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/dtype.h"

namespace cachalot {

enum class KvFormat : uint8_t { f32, f16, bf16, fp8 };

constexpr const char* name_of(KvFormat format) {
  switch (format) {
    case KvFormat::f32: return "f32";
    case KvFormat::f16: return "f16";
    case KvFormat::bf16: return "bf16";
    case KvFormat::fp8: return "fp8";
  }
  return "?";
}
// The elements that rows are made of; fp8 rows are bytes.
constexpr DType dtype_of(KvFormat format) {
  switch (format) {
    case KvFormat::f32: return DType::f32;
    case KvFormat::f16: return DType::f16;
    case KvFormat::bf16: return DType::bf16;
    case KvFormat::fp8: return DType::u8;
  }
  return DType::u8;
}

constexpr int kKvScaleGroup = 128;  // latent numbers of an fp8 row that share a scale
// Bytes of an fp8 row; the rank a multiple of 4 and rope_dim even, so that scales and rope key are aligned.
constexpr size_t fp8_row_bytes(int kv_rank, int rope_dim) {
  return static_cast<size_t>(kv_rank) + 4 * static_cast<size_t>((kv_rank + kKvScaleGroup - 1) / kKvScaleGroup) +
         2 * static_cast<size_t>(rope_dim);
}
constexpr bool fp8_row_fits(int kv_rank, int rope_dim) { return kv_rank > 0 && kv_rank % 4 == 0 && rope_dim >= 0 && rope_dim % 2 == 0; }

struct KvLayout {
  int heads = 0;               // KV heads; 1 for MLA
  int k_dim = 0, v_dim = 0;    // per head; MLA: kv_lora_rank + rope_dim, and kv_lora_rank
  bool v_is_k_prefix = false;  // MLA: V is the first v_dim numbers of the K row, stored once
  KvFormat format = KvFormat::f32;
  int block_tokens = 16;  // 8, 16, 32 or 64

  [[nodiscard]] size_t k_row_bytes() const {
    if (format == KvFormat::fp8) return fp8_row_bytes(v_dim, k_dim - v_dim);
    return static_cast<size_t>(heads) * static_cast<size_t>(k_dim) * size_of(dtype_of(format));
  }
  [[nodiscard]] size_t v_row_bytes() const {
    return v_is_k_prefix ? 0 : static_cast<size_t>(heads) * static_cast<size_t>(v_dim) * size_of(dtype_of(format));
  }
  [[nodiscard]] size_t token_bytes() const { return k_row_bytes() + v_row_bytes(); }  // of one token in one layer
};

// One layer's pages on the device.
struct KvLayer {
  KvLayout layout;
  void* k = nullptr;  // [n_blocks, block_tokens, heads * k_dim], or fp8 rows
  void* v = nullptr;  // [n_blocks, block_tokens, heads * v_dim]; null when v_is_k_prefix
};

}  // namespace cachalot
