// Batch: what one forward step runs on. Rows of several sequences lie one after the other; each sequence has n_q >= 1 new
// tokens on top of the tokens that the KV cache already holds. All index arrays are i32 on the device of the Ops, at addresses that
// stay the same from step to step, so that a captured graph can be replayed after they were rewritten. Padding entries are -1.
#pragma once

#include <span>

#include "tensor/view.h"

namespace cachalot {

// A run of rows, and the run of sequences that they belong to.
struct Rows {
  int row_begin = 0, n_rows = 0;
  int seq_begin = 0, n_seqs = 0;
};

struct Batch {
  int n_tokens = 0;  // rows, padding included
  int n_seqs = 0;    // sequences, padding included
  int max_q = 0;     // largest number of new tokens of a sequence
  int max_kv = 0;    // largest kv_len, or a bound on it when the step is captured

  // Sequences are sorted: those with few new tokens first (attended in the absorbed form when the model has one), then those with many.
  Rows decode, prefill;

  View tokens;              // [n_tokens] token ids
  View positions;           // [n_tokens] position in the sequence, from 0
  View slots;               // [n_tokens] where the row's KV goes: block * block_tokens + offset; -1 writes nothing
  View q_start;             // [n_seqs + 1] first row of each sequence
  View kv_len;              // [n_seqs] tokens in the cache once this step's rows are written; 0 for padding
  View block_table;         // [n_seqs, max_blocks] physical block of each logical block
  View logit_rows;          // [n_logits] rows whose logits are wanted
  bool scores_all = false;  // these are all rows, in order; of padding they may be anything

  // Host copies for planning launches (grid sizes, context chunks) outside captured code: [n_seqs + 1] and [n_seqs].
  std::span<const int> host_q_start, host_kv_len;
};

}  // namespace cachalot
