// Which tensors of a safetensors model together are one quantized matrix, and how they become a source of weights.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "io/quant_config.h"
#include "tensor/canonicalise.h"

namespace cachalot {

// A tensor by the file's name, or null.
using FindTensor = std::function<const TensorInfo*(std::string_view)>;

// "X.weight" for the tensor "X.qweight" or "X.weight_packed" that holds the integer codes of X by this configuration; "" for other tensors.
std::string weight_of_codes(const QuantConfig& config, const TensorInfo& tensor);
// The names of the tensors that may stand beside this one, which holds codes or is an FP8 weight, and belong to it.
std::vector<std::string> companions_of(const QuantConfig& config, const TensorInfo& tensor);

// The matrix [out, in] whose codes `tensor` holds. Throws Error naming file and tensor when a companion is missing, when a shape or type is
// not what the configuration says, or when the configuration keeps this module unquantized.
PlanarWeights read_planar(const QuantConfig& config, const TensorInfo& tensor, int out, int in, const FindTensor& find);

// The scales of an FP8 weight as fp8_block has them, f32 [ceil(out/128), ceil(in/128)]: those of the file where they are so already,
// otherwise made into `owned`.
struct Fp8Scales {
  std::span<const std::byte> bytes;
  std::shared_ptr<const std::vector<float>> owned;
};
Fp8Scales read_fp8_scales(const TensorInfo& scales, int out, int in);

// The scale tensor of an FP8 weight, or null: "X.weight_scale_inv" (DeepSeek), "X.weight_scale" (compressed-tensors and others).
const TensorInfo* fp8_scales_of(const TensorInfo& weight, const FindTensor& find);

}  // namespace cachalot
