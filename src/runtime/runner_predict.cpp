// Runner: the prediction layer, on the rows of the last step and on rows behind them.
#include <algorithm>

#include "base/check.h"
#include "runtime/runner.h"

namespace cachalot {

StepResult Runner::predict(std::span<const Predicted> items) {
  CACHALOT_CHECK(decoder_.mtp() && items.size() == item_rows_.size());
  StepResult result;
  result.first_row.assign(items.size(), -1);
  const Offsets& at = at_;
  int n_logits = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    const Predicted& item = items[i];
    const auto row = static_cast<size_t>(item_rows_[i]);
    for (int r = 0; r < item.n_rows; ++r) {
      const bool valid = r < item.n_valid;
      host_[at.tokens + row + static_cast<size_t>(r)] = valid ? item.sequence->tokens[static_cast<size_t>(item.first + r) + 1] : 0;
      if (!valid) host_[at.slots + row + static_cast<size_t>(r)] = -1;
    }
    if (!item.wanted || item.n_valid == 0) continue;
    result.first_row[i] = n_logits;
    host_[at.logit_rows + static_cast<size_t>(n_logits++)] = item_rows_[i] + item.n_valid - 1;
  }
  batch_.logit_rows = View::vector(static_cast<int*>(device_.get()) + at.logit_rows, DType::i32, n_logits);
  upload();
  result.logits = View::matrix(logits_.get(), DType::f32, n_logits, decoder_.config().vocab);
  decoder_.predict(ops_, batch_, cache_.layers().back(), true, hidden(), result.logits);
  predicted_ = hidden();
  return result;
}

bool Runner::has_place(const Guessed& row) const {
  return row.position < limits_.max_sequence && row.position / cache_.block_tokens() < static_cast<int>(row.sequence->blocks.size());
}

StepResult Runner::predict_further(std::span<const Guessed> rows) {
  const int n = static_cast<int>(rows.size()), block_tokens = cache_.block_tokens(), hidden_size = decoder_.config().hidden;
  CACHALOT_CHECK(n > 0 && n <= std::min(limits_.max_seqs, limits_.max_logits), "{} rows", n);
  int* const host = host_.data();
  // Their hidden states, side by side.
  Buffer& next = predicted_.data == further_[0].get() ? further_[1] : further_[0];
  std::vector<int> from;
  for (const Guessed& row : rows) from.push_back(host[at_.logit_rows + static_cast<size_t>(row.from)]);
  ops_.upload(device_.get(), from.data(), from.size() * sizeof(int));
  const View states = View::matrix(next.get(), DType::f32, n, hidden_size);
  ops_.gather_rows(predicted_, View::vector(device_.get(), DType::i32, n), states);

  const Offsets at = at_ = Offsets(n, n, n);
  batch_ = {};
  batch_.max_q = 1;
  for (const Guessed& row : rows) batch_.max_kv = std::max(batch_.max_kv, row.position + 1);
  const int table_cols = blocks_for(batch_.max_kv, block_tokens);
  StepResult result;
  for (int i = 0; i < n; ++i) {
    const auto r = static_cast<size_t>(i);
    const auto& [sequence, position, token, from_row] = rows[r];
    CACHALOT_CHECK(has_place(rows[r]), "position {}", position);
    int* const table = host + at.block_table + r * static_cast<size_t>(table_cols);
    const int n_blocks = blocks_for(position + 1, block_tokens);
    std::fill(std::copy(sequence->blocks.begin(), sequence->blocks.begin() + n_blocks, table), table + table_cols, -1);
    host[at.tokens + r] = token;
    host[at.positions + r] = position;
    host[at.slots + r] = table[position / block_tokens] * block_tokens + position % block_tokens;
    host[at.q_start + r] = i;
    host[at.kv_len + r] = position + 1;
    host[at.logit_rows + r] = i;
    result.first_row.push_back(i);
  }
  host[at.q_start + static_cast<size_t>(n)] = n;
  batch_.decode = {0, n, 0, n};
  set_views(n, n, n, table_cols);
  upload();
  result.logits = View::matrix(logits_.get(), DType::f32, n, decoder_.config().vocab);
  decoder_.predict(ops_, batch_, cache_.layers().back(), false, states, result.logits);
  predicted_ = states;
  return result;
}

}  // namespace cachalot
