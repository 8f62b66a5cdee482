// PagedBatch: a batch of sequences over a cache whose pages lie in random physical order, for one test case.
#pragma once

#include <memory>

#include "ops/case_support.h"

namespace cachalot::test {

struct PagedBatch {
  Batch batch;
  KvLayer kv;
  std::vector<int> q_start, kv_len;  // host copies that batch refers to
  std::shared_ptr<CaseTensor> k,
      v;  // the pages as rows of a token: [n_blocks * block_tokens, heads * dim], fp8 rows as bytes; v null when it is a prefix of K
  double context_bytes = 0.0;  // of the cache that these sequences hold

  // Rows of the sequences [first, first + count).
  [[nodiscard]] Rows rows(int first, int count) const {
    const int begin = q_start[static_cast<size_t>(first)];
    return {begin, q_start[static_cast<size_t>(first + count)] - begin, first, count};
  }
};

// Each sequence takes n_q rows, also when its kv_len is 0, as padding of a captured step does. Cache rows of the sequences hold normal
// numbers; all other rows hold 1e4, so that a row read by mistake shows.
std::shared_ptr<PagedBatch> make_paged_batch(CaseBuilder& builder, const KvLayout& layout, std::span<const SequenceShape> sequences,
                                             float scale = 1.0f);

}  // namespace cachalot::test
