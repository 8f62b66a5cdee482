// Attention on rows of bf16 with AVX-512 BF16. Built with flags of its own.
#include "cpu/isa/bf16_form.h"

namespace cachalot::cpu {

constinit const AttentionKernels kAvx512Bf16Attention = make_attention<Bf16Form>();

}  // namespace cachalot::cpu
