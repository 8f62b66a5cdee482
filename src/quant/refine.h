// What GPTQ leaves, lowered further: it fixes a column once and for all before it has seen those behind. Afterwards each code can move to
// where it is best beside all the others, and each scale to what is best for its codes: coordinate descent on the error of the outputs,
// trace((W - V) (G + damping) (W - V)^T).
#pragma once

#include <span>

#include "quant/matrix_quantizer.h"
#include "quant/moments.h"

namespace cachalot {

// Goes on from the codes of matrix m that `stack` has for values [out, in], until no code moves or a few rounds are over. Scales move in
// planar formats only: those of blocks are nested or shared. damping: absolute, as GPTQ's.
void refine_codes(Ops& ops, const Moments& moments, float damping, QuantizedStack& stack, int m, std::span<const float> values,
                  ThreadPool& pool);

}  // namespace cachalot
