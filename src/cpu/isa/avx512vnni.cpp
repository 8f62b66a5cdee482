// The integer products of the wide layout. Built with flags of its own: see CMakeLists.txt.
#include "cpu/isa/wide.h"

namespace cachalot::cpu {
namespace {

template <Codec C>
constexpr void fill(WideKernels& k) {
  k.product[static_cast<int>(C)] = wide_product<C>;
}
constexpr WideKernels make_kernels() {
  WideKernels k;
  k.quantise = quantise_row;
  fill<Codec::q4_0>(k);
  fill<Codec::q4_1>(k);
  fill<Codec::q5_0>(k);
  fill<Codec::q5_1>(k);
  fill<Codec::q8_0>(k);
  fill<Codec::q4_k>(k);
  fill<Codec::q5_k>(k);
  fill<Codec::q6_k>(k);
  fill<Codec::iq4_nl>(k);
  fill<Codec::iq4_xs>(k);
  fill<Codec::mxfp4>(k);
  fill<Codec::int4>(k);
  fill<Codec::int8>(k);
  return k;
}

}  // namespace

constinit const WideKernels kAvx512VnniKernels = make_kernels();

}  // namespace cachalot::cpu
