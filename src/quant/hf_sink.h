// HfSink: writes a quantized model as a Hugging Face directory while it comes into being: AWQ, GPTQ, compressed-tensors or FP8 tensors in
// safetensors files, config.json with its quantization_config, and the tokenizer's files. Each piece is read back when it is on the disk.
#pragma once

#include <memory>

#include "convert/hf_layout.h"
#include "io/sharded_writer.h"
#include "quant/file_format.h"
#include "quant/partial_run.h"
#include "quant/quantize_model.h"

namespace cachalot {

struct HfSinkOptions {
  FileFormat format = FileFormat::awq;
  bool folded = false;  // norms and router hold AWQ's factors: they are written as f32
  uint64_t shard_bytes = uint64_t{5} << 30;
  std::filesystem::path companions;  // a folder whose tokenizer files are copied; empty: the original's own
};

class HfSink final : public QuantizeSink {
 public:
  // `original` and `run` must outlive the sink. Layers that the run has already are expected in its folder and are not written again.
  HfSink(const Checkpoint& original, PartialRun& run, HfSinkOptions options);

  void start(const Config& config, const std::vector<PlannedMatrix>& plan) override;
  void globals(const Checkpoint& model) override;
  void layer(int layer, const Checkpoint& model) override;
  // Writes what is left and puts the folder in its place.
  void finish() override;

  // The model as far as it is written.
  [[nodiscard]] const Checkpoint& written() const { return *written_; }
  [[nodiscard]] uint64_t bytes() const { return writer_.bytes(); }
  [[nodiscard]] int n_checked() const { return n_checked_; }  // matrices and vectors that were read back

 private:
  struct Stored {  // one tensor of a file
    std::string name, dtype;
    std::vector<int64_t> shape;
  };
  [[nodiscard]] Scheme scheme_of(const HfEntry& entry) const;
  [[nodiscard]] Format vector_format(const HfEntry& entry) const;
  [[nodiscard]] std::vector<Stored> stored(const HfEntry& entry, int expert) const;
  void declare(const std::vector<HfEntry>& entries);
  void write(const std::vector<HfEntry>& entries, const Checkpoint& model);
  void write_vector(const HfEntry& entry, const Checkpoint& model);
  void write_matrix(const HfEntry& entry, int expert, const LinearSource& source);
  void check(const std::vector<HfEntry>& entries, const Checkpoint& model);
  void write_companions() const;

  const Checkpoint& original_;
  PartialRun& run_;
  HfSinkOptions options_;
  Config config_;
  std::vector<PlannedMatrix> plan_;
  std::map<std::string, Scheme> schemes_;
  std::map<std::string, Format> vector_formats_;  // as the original stores them, by the file's name
  ShardedWriter writer_;
  std::unique_ptr<Checkpoint> written_;
  int n_checked_ = 0;
};

}  // namespace cachalot
