// Names, shapes and types of AWQ, GPTQ, compressed-tensors and FP8 tensors.
#include "io/quantized_tensors.h"

#include <cmath>
#include <cstring>

#include "base/error.h"
#include "base/float_formats.h"
#include "io/checkpoint_impl.h"
#include "tensor/dequant.h"

namespace cachalot {
namespace {

using Scheme = QuantConfig::Scheme;

// The ending of the tensors that hold codes, and those of what belongs to them.
constexpr std::string_view kWordCodes = ".qweight", kPackedCodes = ".weight_packed";

std::string_view codes_ending(Scheme scheme) {
  switch (scheme) {
    case Scheme::awq:
    case Scheme::gptq: return kWordCodes;
    case Scheme::pack_quantized: return kPackedCodes;
    case Scheme::none:
    case Scheme::fp8: break;
  }
  return {};
}

std::string module_of(const QuantConfig& config, const TensorInfo& tensor) {
  return tensor.name.substr(0, tensor.name.size() - codes_ending(config.scheme).size());
}

// The companions of one matrix's codes.
class Parts {
 public:
  Parts(const QuantConfig& config, const TensorInfo& codes, const FindTensor& find)
      : codes_(codes), module_(module_of(config, codes)), find_(find) {}

  [[nodiscard]] const std::string& module() const { return module_; }
  [[nodiscard]] const TensorInfo* optional(std::string_view ending) const { return find_(module_ + std::string(ending)); }
  [[nodiscard]] const TensorInfo& required(std::string_view ending) const {
    const TensorInfo* const found = optional(ending);
    if (found == nullptr)
      fail("{}: tensor \"{}\" needs the tensor \"{}{}\", which is missing", codes_.file, printable(codes_.name), printable(module_),
           ending);
    return *found;
  }

 private:
  const TensorInfo& codes_;
  std::string module_;
  const FindTensor& find_;
};

[[noreturn]] void wrong_type(const TensorInfo& tensor, std::string_view expected) {
  fail("{}: tensor \"{}\": type: found {}, expected {}", tensor.file, printable(tensor.name), tensor.dtype, expected);
}

std::span<const std::byte> words(const TensorInfo& tensor, int64_t rows, int64_t cols) {
  if (tensor.dtype != "I32") wrong_type(tensor, "I32");
  check_shape(tensor, {rows, cols});
  return tensor.data;
}

bool is_float(const TensorInfo& tensor) {
  return tensor.has_format && (tensor.format == Format::f32 || tensor.format == Format::f16 || tensor.format == Format::bf16);
}

// The values of a float tensor as f16: its own bytes, or a copy in `owned`.
std::span<const std::byte> as_f16(const TensorInfo& tensor, std::vector<std::byte>& owned) {
  if (!is_float(tensor)) wrong_type(tensor, "F16, BF16 or F32");
  if (tensor.format == Format::f16) return tensor.data;
  const size_t n = tensor.data.size() / row_bytes(tensor.format, 1);
  std::vector<float> values(n);
  dequant_row(tensor.format, tensor.data.data(), static_cast<int64_t>(n), values.data());
  owned.resize(n * sizeof(uint16_t));
  for (size_t i = 0; i < n; ++i) {
    const uint16_t half = f32_to_f16(values[i]);
    if (std::isfinite(values[i]) && !std::isfinite(f16_to_f32(half)))
      fail("{}: tensor \"{}\": found the scale {}, expected at most 65504", tensor.file, printable(tensor.name), values[i]);
    std::memcpy(&owned[i * sizeof half], &half, sizeof half);
  }
  return owned;
}

// Bits of each code where `columns` words hold the codes of a row (or column) of `in`.
int bits_of(const QuantConfig& config, const TensorInfo& tensor, int64_t columns, int in) {
  if (config.bits != 0) return config.bits;
  for (const int bits : {4, 8})
    if (columns == int64_t{in} * bits / 32) return bits;
  fail("{}: tensor \"{}\": shape: found [{}], expected {} codes of 4 or 8 bits in words of 32", tensor.file, printable(tensor.name),
       fmt::join(tensor.shape, ", "), in);
}

// The group size, by the configuration or from the number of groups that a tensor has.
int group_of(const QuantConfig& config, const TensorInfo& tensor, size_t axis, int in) {
  if (config.group != 0) return config.group;
  const int64_t n = tensor.shape.size() > axis ? tensor.shape[axis] : 0;
  if (n <= 0 || n > in || in % n != 0)
    fail("{}: tensor \"{}\": shape: found [{}], expected a divisor of {} columns as the number of groups", tensor.file,
         printable(tensor.name), fmt::join(tensor.shape, ", "), in);
  return static_cast<int>(in / n);
}

int64_t n_groups(int in, int group) { return group == -1 ? 1 : (int64_t{in} + group - 1) / group; }

void check_divides(const TensorInfo& tensor, const char* what, int n, int per_word) {
  if (n % per_word != 0)
    fail("{}: tensor \"{}\": found {} {}, expected a multiple of {}", tensor.file, printable(tensor.name), n, what, per_word);
}

PlanarWeights read_awq(const QuantConfig& config, const TensorInfo& codes, int out, int in, const Parts& parts) {
  constexpr int kPerWord = 8;
  check_divides(codes, "outputs", out, kPerWord);
  const TensorInfo &zeros = parts.required(".qzeros"), &scales = parts.required(".scales");
  const int group = group_of(config, scales, 0, in);
  const int64_t n = n_groups(in, group);
  check_shape(scales, {n, out});
  std::vector<std::byte> owned;
  return canonicalise(AwqTensors{.name = codes.file + ": " + parts.module(),
                                 .out = out,
                                 .in = in,
                                 .group = group,
                                 .qweight = words(codes, in, out / kPerWord),
                                 .qzeros = words(zeros, n, out / kPerWord),
                                 .scales = as_f16(scales, owned)});
}

PlanarWeights read_gptq(const QuantConfig& config, const TensorInfo& codes, int out, int in, const Parts& parts) {
  const int bits = bits_of(config, codes, codes.shape.empty() ? 0 : codes.shape[0], in), per_word = 32 / bits;
  check_divides(codes, "inputs", in, per_word);
  check_divides(codes, "outputs", out, per_word);
  const TensorInfo &zeros = parts.required(".qzeros"), &scales = parts.required(".scales");
  const TensorInfo* const order = parts.optional(".g_idx");
  const int group = group_of(config, scales, 0, in);
  const int64_t n = n_groups(in, group);
  check_shape(scales, {n, out});
  if (order != nullptr) {
    if (order->dtype != "I32") wrong_type(*order, "I32");
    check_shape(*order, {in});
  }
  std::vector<std::byte> owned;
  return canonicalise(GptqTensors{.name = codes.file + ": " + parts.module(),
                                  .out = out,
                                  .in = in,
                                  .bits = bits,
                                  .group = group,
                                  .version = config.version,
                                  .qweight = words(codes, in / per_word, out),
                                  .qzeros = words(zeros, n, out / per_word),
                                  .scales = as_f16(scales, owned),
                                  .g_idx = order != nullptr ? order->data : std::span<const std::byte>{}});
}

void check_weight_shape(const TensorInfo& tensor, int out, int in) {
  check_shape(tensor, {2});
  int64_t shape[2] = {};
  for (size_t i = 0; i < 2; ++i) {
    if (tensor.dtype == "I64")
      shape[i] = load<int64_t>(tensor.data.data() + i * sizeof(int64_t));
    else if (tensor.dtype == "I32")
      shape[i] = load<int32_t>(tensor.data.data() + i * sizeof(int32_t));
    else
      wrong_type(tensor, "I64 or I32");
  }
  if (shape[0] != out || shape[1] != in)
    fail("{}: tensor \"{}\": found the shape [{}, {}], expected [{}, {}]", tensor.file, printable(tensor.name), shape[0], shape[1], out,
         in);
}

PlanarWeights read_pack_quantized(const QuantConfig& config, const TensorInfo& codes, int out, int in, const Parts& parts) {
  const int bits = bits_of(config, codes, codes.shape.size() < 2 ? 0 : codes.shape[1], in), per_word = 32 / bits;
  check_divides(codes, "inputs", in, per_word);
  if (const TensorInfo* const shape = parts.optional(".weight_shape")) check_weight_shape(*shape, out, in);
  const TensorInfo& scales = parts.required(".weight_scale");
  const TensorInfo *const zeros = parts.optional(".weight_zero_point"), *const order = parts.optional(".weight_g_idx");
  const int group = group_of(config, scales, 1, in);
  const int64_t n = n_groups(in, group);
  check_shape(scales, {out, n});
  if (zeros != nullptr) check_divides(*zeros, "outputs", out, per_word);
  if (order != nullptr) {
    if (order->dtype != "I32") wrong_type(*order, "I32");
    check_shape(*order, {in});
  }
  std::vector<std::byte> owned;
  return canonicalise(
      PackQuantizedTensors{.name = codes.file + ": " + parts.module(),
                           .out = out,
                           .in = in,
                           .bits = bits,
                           .group = group,
                           .weight_packed = words(codes, out, in / per_word),
                           .weight_scale = as_f16(scales, owned),
                           .weight_zero_point = zeros != nullptr ? words(*zeros, out / per_word, n) : std::span<const std::byte>{},
                           .weight_g_idx = order != nullptr ? order->data : std::span<const std::byte>{}});
}

}  // namespace

std::string weight_of_codes(const QuantConfig& config, const TensorInfo& tensor) {
  const std::string_view ending = codes_ending(config.scheme);
  if (ending.empty() || !tensor.name.ends_with(ending)) return {};
  return module_of(config, tensor) + ".weight";
}

std::vector<std::string> companions_of(const QuantConfig& config, const TensorInfo& tensor) {
  std::vector<std::string> out;
  if (tensor.dtype == "F8_E4M3") {
    // Scales of activations, which we compute at a finer type.
    for (const char* ending : {"_scale_inv", "_scale"}) out.push_back(tensor.name + ending);
    if (tensor.name.ends_with(".weight"))
      out.push_back(tensor.name.substr(0, tensor.name.size() - std::string_view("weight").size()) + "input_scale");
    return out;
  }
  const std::string module = module_of(config, tensor);
  if (config.scheme == Scheme::pack_quantized) {
    for (const char* ending : {".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx"}) out.push_back(module + ending);
  } else {
    for (const char* ending : {".qzeros", ".scales", ".g_idx"}) out.push_back(module + ending);
  }
  return out;
}

PlanarWeights read_planar(const QuantConfig& config, const TensorInfo& tensor, int out, int in, const FindTensor& find) {
  const Parts parts(config, tensor, find);
  if (is_kept(config, parts.module()))
    fail("{}: tensor \"{}\": is quantized, but {}: {} says that its module is not", tensor.file, printable(tensor.name), config.where,
         config.kept_key);
  switch (config.scheme) {
    case Scheme::awq: return read_awq(config, tensor, out, in, parts);
    case Scheme::gptq: return read_gptq(config, tensor, out, in, parts);
    case Scheme::pack_quantized: return read_pack_quantized(config, tensor, out, in, parts);
    case Scheme::none:
    case Scheme::fp8: break;
  }
  fail("{}: tensor \"{}\": no integer codes by {}", tensor.file, printable(tensor.name), config.where);
}

const TensorInfo* fp8_scales_of(const TensorInfo& weight, const FindTensor& find) {
  if (weight.dtype != "F8_E4M3") return nullptr;
  if (const TensorInfo* const found = find(weight.name + "_scale_inv")) return found;
  return find(weight.name + "_scale");
}

Fp8Scales read_fp8_scales(const TensorInfo& scales, int out, int in) {
  const auto blocks = [](int n) { return (n + kFp8Block - 1) / kFp8Block; };
  const std::vector<int64_t> grid{blocks(out), blocks(in)};
  if (!is_float(scales)) wrong_type(scales, "F32, BF16 or F16");
  size_t n = 1;
  for (const int64_t dim : scales.shape) n *= static_cast<size_t>(dim);
  const bool one = n == 1 && scales.shape.size() <= 2;
  if (!one && scales.shape != grid && (scales.shape == std::vector<int64_t>{out} || scales.shape == std::vector<int64_t>{out, 1}))
    fail("{}: tensor \"{}\": shape: found [{}], a scale for each output, expected one scale or blocks of 128 x 128: [{}, {}]", scales.file,
         printable(scales.name), fmt::join(scales.shape, ", "), grid[0], grid[1]);
  if (!one) check_shape(scales, grid);
  if (!one && scales.format == Format::f32) return {.bytes = scales.data, .owned = nullptr};
  std::vector<float> values(n);
  dequant_row(scales.format, scales.data.data(), static_cast<int64_t>(n), values.data());
  if (one) values.assign(static_cast<size_t>(grid[0] * grid[1]), values[0]);
  auto owned = std::make_shared<const std::vector<float>>(std::move(values));
  return {.bytes = std::as_bytes(std::span(*owned)), .owned = owned};
}

}  // namespace cachalot
