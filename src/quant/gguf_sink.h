// GgufSink: writes a quantized model as a GGUF file while it comes into being. And the mixes of types that llama.cpp's files use.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "convert/gguf_convert.h"
#include "quant/partial_run.h"
#include "quant/quantize_model.h"

namespace cachalot {

class GgufSink final : public QuantizeSink {
 public:
  // `original` must outlive the sink. `metadata`: further string keys, such as what fell back. With a run, which must outlive it too, the
  // file comes into being in the run's folder, behind the layers that it has.
  GgufSink(const Checkpoint& original, std::filesystem::path out, int file_type, std::vector<std::pair<std::string, std::string>> metadata,
           PartialRun* run = nullptr);

  // Throws Error when the plan has a scheme that GGUF cannot hold.
  void start(const Config& config, const std::vector<PlannedMatrix>& plan) override;
  void globals(const Checkpoint& model) override;
  void layer(int layer, const Checkpoint& model) override;
  void finish() override;
  // With a run: the model as far as it is written, by the conventions of the original.
  [[nodiscard]] const Checkpoint& written() const { return view_ ? *view_ : *file_; }
  [[nodiscard]] const ConvertResult& result() const { return result_; }

 private:
  const Checkpoint& original_;
  std::filesystem::path out_;
  int file_type_;
  std::vector<std::pair<std::string, std::string>> metadata_;
  PartialRun* run_;
  std::unique_ptr<GgufModelWriter> writer_;
  std::unique_ptr<Checkpoint> file_, view_;
  ConvertResult result_;
};

// llama.cpp's number for a file of mostly this type or mix; -1: unknown.
int gguf_file_type(std::string_view type_or_mix);

// The mixes: q4_k_m, q4_k_s, q5_k_m, q5_k_s. Most matrices take the type; output (or the tied embedding) takes q6_k, and value and down
// projections of some layers take a finer type, with *_m in every layer of the first and last eighth and each third between. Expert stacks
// and the latent's expansion count by what they do. Nothing for another name.
std::optional<std::map<std::string, Scheme>> gguf_mix(std::string_view name, const Config& config, bool split_kv_b);

}  // namespace cachalot
