// KvCache: the pages of every layer on the device, the pool that hands them out, and the block tables of sequences.
#pragma once

#include <span>
#include <vector>

#include "model/decoder.h"
#include "runtime/block_pool.h"
#include "runtime/sequence.h"

namespace cachalot {

class KvCache {
 public:
  // Pages for n_blocks * block_tokens tokens in each of n_layers layers; 0: as many as the model has.
  KvCache(Ops& ops, const Config& config, KvFormat format, int block_tokens, int n_blocks, int n_layers = 0);

  [[nodiscard]] std::span<const KvLayer> layers() const { return layers_; }
  [[nodiscard]] int block_tokens() const { return block_tokens_; }
  [[nodiscard]] const BlockPool& pool() const { return pool_; }
  [[nodiscard]] size_t bytes() const { return bytes_; }

  // Gives the sequence blocks for its first n_tokens tokens. False, and nothing changed, when the pool has too few.
  [[nodiscard]] bool reserve(Sequence& sequence, int n_tokens);
  // Forgets rows from n_tokens on and returns blocks that only they used.
  void truncate(Sequence& sequence, int n_tokens);
  void release(Sequence& sequence) { truncate(sequence, 0); }

 private:
  int block_tokens_;
  BlockPool pool_;
  std::vector<KvLayer> layers_;
  std::vector<Buffer> memory_;
  size_t bytes_ = 0;
};

}  // namespace cachalot
