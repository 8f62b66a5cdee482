// Batches over random pages: see paged_batch.h.
#include "ops/paged_batch.h"

#include <algorithm>

#include "ops/kv_codec.h"

namespace cachalot::test {

std::shared_ptr<PagedBatch> make_paged_batch(CaseBuilder& builder, const KvLayout& layout, std::span<const SequenceShape> sequences,
                                             float scale) {
  auto out = std::make_shared<PagedBatch>();
  const int block_tokens = layout.block_tokens;
  const auto blocks_of = [&](int tokens) { return (tokens + block_tokens - 1) / block_tokens; };
  int n_blocks = 3, max_blocks = 2;
  for (const SequenceShape& s : sequences) {
    n_blocks += blocks_of(s.kv_len);
    max_blocks = std::max(max_blocks, blocks_of(s.kv_len) + 1);
  }
  std::vector<int> order(static_cast<size_t>(n_blocks));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), builder.engine());

  std::vector<int> tokens, positions, slots, table(sequences.size() * static_cast<size_t>(max_blocks), -1);
  std::vector<bool> in_use(static_cast<size_t>(n_blocks) * static_cast<size_t>(block_tokens));
  size_t next_block = 0, row_of_table = 0;
  out->q_start.push_back(0);
  for (const SequenceShape& s : sequences) {
    int* blocks = &table[row_of_table];
    row_of_table += static_cast<size_t>(max_blocks);
    for (int i = 0; i < blocks_of(s.kv_len); ++i) blocks[i] = order[next_block++];
    const auto slot = [&](int position) { return blocks[position / block_tokens] * block_tokens + position % block_tokens; };
    for (int position = 0; position < s.kv_len; ++position) in_use[static_cast<size_t>(slot(position))] = true;
    for (int i = 0; i < s.n_q; ++i) {
      const int position = s.kv_len == 0 ? -1 : s.kv_len - s.n_q + i;
      tokens.push_back(s.kv_len == 0 ? -1 : builder.uniform(0, 99));
      positions.push_back(position);
      slots.push_back(position < 0 ? -1 : slot(position));
    }
    out->q_start.push_back(out->q_start.back() + s.n_q);
    out->kv_len.push_back(s.kv_len);
    out->context_bytes += s.kv_len * static_cast<double>(layout.token_bytes());
  }

  const auto pages = [&](const KvLayout& form) {
    const int cols = form.heads * form.k_dim;
    const bool bytes = form.format == KvFormat::fp8;
    auto tensor = builder.unset(dtype_of(form.format), n_blocks * block_tokens, bytes ? static_cast<int>(form.k_row_bytes()) : cols);
    auto values = builder.normals(in_use.size() * static_cast<size_t>(cols), scale);
    for (size_t i = 0; i < values.size(); ++i)
      if (!in_use[i / static_cast<size_t>(cols)]) values[i] = 1e4f;
    if (!bytes) {
      tensor->set(values);
      return tensor;
    }
    std::vector<std::byte> rows(in_use.size() * form.k_row_bytes());
    for (size_t r = 0; r < in_use.size(); ++r)
      encode_kv_row(form, std::span(values).subspan(r * static_cast<size_t>(cols), static_cast<size_t>(cols)),
                    &rows[r * form.k_row_bytes()]);
    tensor->set(std::span<const std::byte>(rows));
    return tensor;
  };
  out->k = pages(layout);
  if (!layout.v_is_k_prefix) {
    KvLayout values = layout;
    values.k_dim = layout.v_dim;
    out->v = pages(values);
  }
  out->kv = {layout, out->k->view().data, out->v ? out->v->view().data : nullptr};

  const auto n_seqs = static_cast<int>(sequences.size()), n_tokens = out->q_start.back();
  Batch& batch = out->batch;
  batch.n_tokens = n_tokens;
  batch.n_seqs = n_seqs;
  for (const SequenceShape& s : sequences) {
    batch.max_q = std::max(batch.max_q, s.n_q);
    batch.max_kv = std::max(batch.max_kv, s.kv_len);
  }
  batch.decode = out->rows(0, n_seqs);
  batch.prefill = {n_tokens, 0, n_seqs, 0};
  batch.tokens = builder.ints(1, n_tokens, tokens)->view();
  batch.positions = builder.ints(1, n_tokens, positions)->view();
  batch.slots = builder.ints(1, n_tokens, slots)->view();
  batch.q_start = builder.ints(1, n_seqs + 1, out->q_start)->view();
  batch.kv_len = builder.ints(1, n_seqs, out->kv_len)->view();
  batch.block_table = builder.ints(n_seqs, max_blocks, table)->view();
  batch.host_q_start = out->q_start;
  batch.host_kv_len = out->kv_len;
  builder.keep(out);
  return out;
}

}  // namespace cachalot::test
