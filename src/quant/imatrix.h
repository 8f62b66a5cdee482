// ImportanceMatrix: for every weight matrix, the sums of the squared inputs of each column over a text, as llama.cpp's llama-imatrix
// gathers them; and its two files, read and written: GGUF (now: tensors NAME.in_sum2 and NAME.counts, keys imatrix.*) and .dat (before
// 2025). Block encoders weigh a column's rounding errors by the mean, sum / count.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "quant/recipe.h"

namespace cachalot {

enum class ImatrixFormat : uint8_t { gguf, dat };

class ImportanceMatrix {
 public:
  // sums holds rows one after the other, counts.size() of them: one for each expert of a stack; a single one for everything else, which for
  // attn_k_b and attn_v_b spans the inputs of all heads. Counts are tokens.
  struct Entry {
    std::vector<float> sums;
    std::vector<int64_t> counts;
  };
  std::map<std::string, Entry> entries;  // by GGUF name of the weight
  std::vector<std::string> datasets;     // where the text came from
  int chunk_count = 0;                   // windows of text
  int chunk_size = 0;                    // tokens of a window; 0: a .dat file, which does not say, and whose counts are windows
  std::string file;                      // for messages; "" when it was not read

  // Throws Error naming file and tensor for what is no importance matrix.
  static ImportanceMatrix read(const std::filesystem::path& path);
  // A .dat file holds means only, of experts that saw no token 1.
  void write(const std::filesystem::path& path, ImatrixFormat format) const;
  // Adds the sums and counts of another text; a .dat file's windows count as chunk_size tokens of this one's. Throws Error when shapes
  // differ.
  void add(const ImportanceMatrix& other);

  // Mean squares of the inputs of matrix m of a stack, [in]. Empty, which weighs all columns alike: for what is not there, what saw no
  // token, and what is no mean of squares (infinite, negative, or zero all over). attn_kv_b and attn_v_b read the same latent, so the one
  // stands in for the other.
  [[nodiscard]] std::vector<float> importance(const ModelMatrix& matrix, int m) const;
};

// What a matrix lacks for a model: a line each, for people.
struct ImatrixFit {
  std::vector<std::string> missing;  // quantized block-format tensors of `plan` without an entry
  std::vector<std::string> neutral;  // "NAME: experts 3, 17 saw no token", "NAME: not finite"
  std::vector<std::string> unknown;  // entries that no tensor of the model has
};
// Throws Error when a width is wrong, or no entry is of this model.
ImatrixFit fit_of(const ImportanceMatrix& imatrix, const std::vector<PlannedMatrix>& plan);

}  // namespace cachalot
