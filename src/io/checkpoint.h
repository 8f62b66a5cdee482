// Checkpoint: a model on disk, whichever container holds it, seen through one set of tensor names (GGUF's: "blk.3.attn_q.weight").
// Safetensors directories are mapped onto those names by io/name_map; quantized ones (AWQ, GPTQ, compressed-tensors, FP8) give their
// matrices in planar or FP8 form. Bytes stay mapped; nothing here knows devices.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensor/linear_source.h"

namespace cachalot {

class GgufFile;  // io/gguf.h
class PackFile;  // io/pack_file.h

// Whether a packed model will do: it can be loaded onto a device, but its tensors have no bytes that anything else could read.
enum class PackedModels : uint8_t { refuse, accept };

// One tensor as its file stores it.
struct TensorInfo {
  std::string name;             // the file's own name
  Format format = Format::f32;  // fp8_block for F8_E4M3 weights that have a scale tensor beside them
  std::vector<int64_t> shape;   // slowest first, as PyTorch writes it
  std::span<const std::byte> data;
  std::string file;        // path of the shard that holds it
  std::string_view dtype;  // the file's own word for the type: "BF16", "Q4_K"
  bool has_format = true;  // false: a type that no Format stands for (I64, or F8_E4M3 without scales); `format` means nothing
  int weights_each = 1;    // weights in each element: 8 in a word of 4-bit codes, 0 where the tensor holds scales, zero points and the like
};

class Checkpoint {
 public:
  enum class Container { safetensors, gguf };

  // A .gguf file (any part of a split one), a .safetensors file, or a directory with either; or a packed model. Throws Error naming what
  // is wrong.
  static std::unique_ptr<Checkpoint> open(const std::filesystem::path& path, PackedModels packed = PackedModels::refuse);
  virtual ~Checkpoint() = default;

  [[nodiscard]] virtual Container container() const = 0;
  [[nodiscard]] virtual std::string name() const = 0;  // for messages: the path given
  // All tensors by the files' own names, in file order.
  [[nodiscard]] virtual const std::vector<TensorInfo>& tensors() const = 0;

  // By GGUF name. Is there a tensor (or a full stack of per-expert tensors) for it?
  [[nodiscard]] virtual bool has(std::string_view canonical) const = 0;
  // A weight matrix, or stack of them for "*_exps" names, with the shape that the caller expects. Throws Error when it is missing,
  // when the shape differs ("found [..], expected [..]"), or when an expert or a scale tensor is absent.
  [[nodiscard]] virtual LinearSource linear(std::string_view canonical, int n_matrices, int out, int in) const = 0;
  // A vector (norm weight, bias) as f32; shape checked likewise.
  [[nodiscard]] virtual std::vector<float> vector(std::string_view canonical, int n) const = 0;
  // The tensors (by the files' own names) that no canonical name covers.
  [[nodiscard]] virtual std::vector<std::string> unmapped() const = 0;
  // Lets the system drop the pages of a source's stored bytes, once they are packed; if they are read after all, the file is read again.
  virtual void forget(const LinearSource& /*source*/) const {}

  // The packed weights, for a packed model: the matrices of linear() have no bytes then.
  [[nodiscard]] virtual const PackFile* packed() const { return nullptr; }

  // Where the configuration is: GGUF metadata, or config.json and its companions (empty when the file is absent).
  [[nodiscard]] virtual const GgufFile* gguf() const { return nullptr; }
  [[nodiscard]] virtual std::string config_json() const { return {}; }
  [[nodiscard]] virtual std::string generation_config_json() const { return {}; }
  [[nodiscard]] virtual std::string tokenizer_json() const { return {}; }
  [[nodiscard]] virtual std::string tokenizer_config_json() const { return {}; }
  [[nodiscard]] virtual std::string chat_template_file() const { return {}; }  // chat_template.jinja beside config.json
};

}  // namespace cachalot
