// Models of a published shape with random weights, for measuring: their checkpoint gives the same random rows again and again, and their
// routing is uniform, chosen by their own routers.
#pragma once

#include <array>
#include <map>
#include <string>

#include "io/checkpoint.h"
#include "ops/ops.h"

namespace cachalot::test {

// The config.json of DeepSeek-V2-Lite ("v2-lite": 15.7 G weights) or DeepSeek-V2 ("v2": 236 G).
std::string shape_config(const std::string& name);

// Matrices in `format`, or its fallback where rows are no whole blocks (router, latent up-projections and embedding in bf16), of 512 random
// rows that repeat; norms of ones. It holds one copy of each shape, so a model larger than the host's memory can be loaded from it.
// The experts of a token are any, others for each token and layer, as in a trained model and unlike in a random one, whose layers leave so
// much in common to all rows that these go to the same few: the embedding's rows all differ and outweigh what layers add to them, and each
// layer has a router of its own.
class RandomCheckpoint : public Checkpoint {
 public:
  RandomCheckpoint(std::string config, Format format) : config_(std::move(config)), format_(format) {}
  [[nodiscard]] Container container() const override { return Container::safetensors; }
  [[nodiscard]] std::string name() const override { return "random"; }
  [[nodiscard]] const std::vector<TensorInfo>& tensors() const override { return none_; }
  [[nodiscard]] bool has(std::string_view canonical) const override;
  [[nodiscard]] LinearSource linear(std::string_view canonical, int n_matrices, int out, int in) const override;
  [[nodiscard]] std::vector<float> vector(std::string_view, int n) const override {
    return std::vector<float>(static_cast<size_t>(n), 1.0f);
  }
  [[nodiscard]] std::vector<std::string> unmapped() const override { return {}; }
  [[nodiscard]] std::string config_json() const override { return config_; }

 private:
  struct Rows {
    LinearSource source;
    std::vector<std::byte> data, scales, zeros;
  };
  [[nodiscard]] Rows repeated_rows(Format format, int out, int in) const;
  [[nodiscard]] static Rows embedding_rows(int out, int in);

  std::string config_;
  Format format_;
  std::vector<TensorInfo> none_;
  mutable std::map<std::array<int, 4>, Rows> shapes_;
};

}  // namespace cachalot::test
