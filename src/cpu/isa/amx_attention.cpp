// Attention on AMX tiles. Built with flags of its own.
#include "cpu/isa/amx_attention.h"

namespace cachalot::cpu {

constinit const AttentionKernels kAmxAttention = make_tile_attention();
constinit const AttentionKernels kAmxF32Attention = make_exact_attention<Element::f32>();
constinit const AttentionKernels kAmxF16Attention = make_exact_attention<Element::f16>();

}  // namespace cachalot::cpu
