// quantize_model: a whole model by a recipe, layer by layer. Each finished layer is handed to the sinks (writers) and, unless it shall
// stay, freed; so memory holds one layer and the calibration streams, however many layers there are. The held-out text goes through both
// models in step, and at the end says what was lost, domain by domain.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "quant/calibration.h"
#include "quant/layer_quantizer.h"

namespace cachalot {

// Takes the quantized model piece by piece, in the order of a GGUF file. `model` has the pieces named by then in their new form
// (int_planar, block formats, fp8_block, floats) by their GGUF names, and everything else as in the original.
class QuantizeSink {
 public:
  virtual ~QuantizeSink() = default;
  virtual void start(const Config& config, const std::vector<PlannedMatrix>& plan) = 0;
  virtual void globals(const Checkpoint& model) = 0;  // embedding, head, final norm
  virtual void layer(int layer, const Checkpoint& model) = 0;
  virtual void finish() = 0;
};

struct DomainLoss {
  std::string domain;
  Divergence divergence;
};

struct QuantizeReport {
  std::vector<MatrixRecord> matrices;
  std::vector<ExpertLoad> experts;
  std::vector<double> layer_seconds;
  double seconds = 0.0;
  double bits_per_weight = 0.0, bits_per_linear_weight = 0.0;  // of all matrices; without embedding and head
  int64_t bytes = 0;                                           // of all matrices
  std::vector<DomainLoss> domains;                             // held-out text; the last entry, "all", is over all of it
  int64_t peak_resident_bytes = 0,
          peak_anonymous_bytes = 0;  // of this process, mapped files included; and without them, at the ends of layers
  int64_t calibration_tokens = 0, held_out_tokens = 0;
};

struct QuantizeOptions {
  bool keep = false;  // keep all layers: `quantized` then is the whole model in memory
  // Of an interrupted run: how many layers its sinks have already (-1: not even embedding and head), what was recorded of them, and where
  // they can be read. They only carry the text on, and are not given to the sinks again.
  int layers_done = -1;
  LayerResult done;
  std::function<const Checkpoint&()> written;
  // After each piece that the sinks have taken, embedding and head being the first: so many layers are done.
  std::function<void(int layers_done, const LayerResult& result)> saved;
  std::function<void(int done, int total, const std::string& what)> progress;
};

// calibration may be empty when the recipe needs none; held_out may be empty, then nothing is measured. The streams are used up.
QuantizeReport quantize_model(LayerQuantizer& quantizer, const Checkpoint& base, const Config& config, Ops& ops, const Recipe& recipe,
                              TokenStream& calibration, TokenStream& held_out, const std::vector<std::string>& domain_names,
                              const std::vector<QuantizeSink*>& sinks, const QuantizeOptions& options);

}  // namespace cachalot
