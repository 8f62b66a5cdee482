// Makes the KernelTable of the instruction set whose simd_*.h was included before.
#pragma once

#include "cpu/isa/attention.h"
#include "cpu/isa/products.h"
#include "cpu/isa/vector_math.h"

namespace cachalot::cpu {
namespace {

template <Codec C>
constexpr void fill_codec(KernelTable& t) {
  t.gemv[static_cast<int>(C)] = gemv<C>;
  t.decode[static_cast<int>(C)] = decode<C>;
}

constexpr KernelTable make_table(const char* name) {
  KernelTable t;
  t.name = name;
  t.gemv_max_tokens = kGemvTokens;
  fill_codec<Codec::f32>(t);
  fill_codec<Codec::f16>(t);
  fill_codec<Codec::bf16>(t);
  fill_codec<Codec::q4_0>(t);
  fill_codec<Codec::q4_1>(t);
  fill_codec<Codec::q5_0>(t);
  fill_codec<Codec::q5_1>(t);
  fill_codec<Codec::q8_0>(t);
  fill_codec<Codec::q2_k>(t);
  fill_codec<Codec::q3_k>(t);
  fill_codec<Codec::q4_k>(t);
  fill_codec<Codec::q5_k>(t);
  fill_codec<Codec::q6_k>(t);
  fill_codec<Codec::iq4_nl>(t);
  fill_codec<Codec::iq4_xs>(t);
  fill_codec<Codec::mxfp4>(t);
  fill_codec<Codec::fp8>(t);
  fill_codec<Codec::int4>(t);
  fill_codec<Codec::int8>(t);
  t.gemm[static_cast<int>(Element::f32)] = gemm<Element::f32>;
  t.gemm[static_cast<int>(Element::f16)] = gemm<Element::f16>;
  t.gemm[static_cast<int>(Element::bf16)] = gemm<Element::bf16>;
  t.rmsnorm = rmsnorm_row;
  t.add_rmsnorm = add_rmsnorm_row;
  t.silu_mul = silu_mul_row;
  t.exp = exp_row;
  t.sigmoid = sigmoid_row;
  t.axpy = axpy_row;
  t.rope = rope_row;
  t.load_rows = load_rows;
  t.load_fp8_rows = load_fp8_rows;
  t.store_row = store_row;
  t.attention[static_cast<int>(Element::f32)] = make_attention<F32Form>();
  return t;
}

}  // namespace
}  // namespace cachalot::cpu
