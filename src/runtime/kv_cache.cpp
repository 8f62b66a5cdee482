// KvCache: allocation per layer, block tables per sequence.
#include "runtime/kv_cache.h"

#include <algorithm>

#include "base/error.h"

namespace cachalot {

KvCache::KvCache(Ops& ops, const Config& config, KvFormat format, int block_tokens, int n_blocks, int n_layers)
    : block_tokens_(block_tokens), pool_(n_blocks, block_tokens) {
  if (block_tokens != 8 && block_tokens != 16 && block_tokens != 32 && block_tokens != 64)
    fail("KV block size is {}, expected 8, 16, 32 or 64 tokens", block_tokens);
  const KvLayout layout = config.kv_layout(format, block_tokens);
  const size_t n_rows = static_cast<size_t>(n_blocks) * static_cast<size_t>(block_tokens);
  for (int l = 0; l < (n_layers > 0 ? n_layers : config.n_layers); ++l) {
    KvLayer layer{layout};
    memory_.push_back(ops.alloc(n_rows * layout.k_row_bytes()));
    layer.k = memory_.back().get();
    if (layout.v_row_bytes() > 0) {
      memory_.push_back(ops.alloc(n_rows * layout.v_row_bytes()));
      layer.v = memory_.back().get();
    }
    layers_.push_back(layer);
    bytes_ += n_rows * layout.token_bytes();
  }
}

bool KvCache::reserve(Sequence& sequence, int n_tokens) {
  const auto wanted = static_cast<size_t>((n_tokens + block_tokens_ - 1) / block_tokens_);
  if (wanted > sequence.blocks.size() && wanted - sequence.blocks.size() > static_cast<size_t>(pool_.n_free())) return false;
  while (sequence.blocks.size() < wanted) sequence.blocks.push_back(*pool_.take());
  return true;
}

void KvCache::truncate(Sequence& sequence, int n_tokens) {
  const auto kept = static_cast<size_t>((n_tokens + block_tokens_ - 1) / block_tokens_);
  while (sequence.blocks.size() > kept) {
    pool_.drop(sequence.blocks.back());
    sequence.blocks.pop_back();
  }
  sequence.n_computed = std::min(sequence.n_computed, n_tokens);
}

}  // namespace cachalot
