// Runner: turns "these sequences, so many new tokens each" into a Batch, and runs the decoder on it. Steps in which every sequence gets
// the same few tokens are padded to one of a few sizes, so that a device that records graphs replays them.
#pragma once

#include <map>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "runtime/kv_cache.h"

namespace cachalot {

// Which form of MLA the rows of a step take. `automatic` is the cheaper one by count of operations; the others are for tests.
enum class MlaForm : uint8_t { automatic, absorbed, expanded };

// Expanded is cheaper for n_q new tokens on n_cached cached ones when n_q (n_cached + n_q / 2) > q* n_cached, with
// q* = R (P + V) / (2R - P - V): 171 for DeepSeek-V2 and V3. See attention_mla.cpp for the letters.
bool prefers_expanded(const MlaDims& dims, int n_q, int n_cached);

enum class WantLogits : uint8_t { none, last, all };

struct StepItem {
  Sequence* sequence = nullptr;
  int n_new = 0;  // tokens [n_computed, n_computed + n_new) are run; they must be there, and their blocks reserved
  WantLogits want = WantLogits::last;
  int drawn = -1;  // >= 0: the one token, not in the sequence yet, is the one that was drawn in this logit row of the step before

  [[nodiscard]] int n_logits() const { return want == WantLogits::all ? n_new : want == WantLogits::last ? 1 : 0; }
};

struct StepResult {
  View logits;                 // f32 [rows, vocab] on the device, valid until the next step
  std::vector<int> first_row;  // per item: its first row in `logits`; -1 when it wanted none
};

struct RunnerLimits {
  int max_tokens = 512;  // rows of a step
  int max_seqs = 1;
  int max_logits = 1;       // logit rows of a step
  int max_sequence = 4096;  // tokens of one sequence
};

// automatic: replay where memory is not the host's; padded: pad steps likewise, but run them call by call (for tests); off: neither.
enum class GraphUse : uint8_t { automatic, padded, off };

// The sizes of padded steps: the smallest one that holds n sequences, and the smallest bound that holds a context of n tokens.
int padded_seqs(int n);
int padded_context(int n);

class Runner {
 public:
  Runner(Ops& ops, const Decoder& decoder, KvCache& cache, const RunnerLimits& limits, MlaForm form = MlaForm::automatic,
         GraphUse graphs = GraphUse::automatic);

  // One forward step; afterwards each item's n_computed has grown by n_new. `drawn` i32, on the device, holds the tokens of items that are
  // yet to learn theirs; all items are, or none is.
  StepResult step(std::span<const StepItem> items, View drawn = {});
  // Runs the decoder's prediction layer on the rows of the last step; each row meets the token that stands behind it in its sequence by
  // now.
  struct Predicted {
    const Sequence* sequence = nullptr;
    int first = 0, n_rows = 0;  // positions of the item's rows in that step
    int n_valid = 0;            // of them, rows that belong to the text and have a token behind them
    bool wanted = false;        // the logits of the last valid row are
  };
  StepResult predict(std::span<const Predicted> items);
  // A row of the prediction layer behind those of the text: `token` was guessed to stand behind `position`.
  struct Guessed {
    const Sequence* sequence = nullptr;
    int position = 0, token = -1;
    int from = 0;  // the logit row, in the call of predict() or predict_further() before, that the token was guessed by
  };
  // Whether the sequence has a page for such a row.
  [[nodiscard]] bool has_place(const Guessed& row) const;
  // Guesses further: runs the prediction layer on one row of each sequence, from what it made of the row before.
  StepResult predict_further(std::span<const Guessed> rows);
  [[nodiscard]] const RunnerLimits& limits() const { return limits_; }

  // Runs the largest steps that the limits allow on made-up tokens, which leave nothing in the cache: temporary memory gets its size.
  void rehearse();
  // Records the graphs of steps with one token per sequence and contexts up to padded_context(1), the smallest first; otherwise a size is
  // recorded when it comes for the second time. Returns how many there are now.
  int record_graphs(int at_most = kMaxGraphs);
  [[nodiscard]] int n_graphs() const { return n_graphs_; }
  [[nodiscard]] int64_t n_replayed() const { return n_replayed_; }  // steps
  // Why recording was given up; "" while it was not.
  [[nodiscard]] const std::string& graph_problem() const { return graph_problem_; }

  static constexpr int kMaxGraphs = 96;     // the one that was not used for longest gives way
  static constexpr int kMaxPaddedRows = 8;  // new tokens per sequence of a padded step

 private:
  // What a padded step's shapes depend on.
  struct Shape {
    int n_seqs = 0, n_new = 0, context = 0;
    bool all_logits = false;
    bool operator<(const Shape& o) const {
      return std::tie(n_seqs, n_new, context, all_logits) < std::tie(o.n_seqs, o.n_new, o.context, o.all_logits);
    }
  };
  struct Recorded {
    std::unique_ptr<Graph> graph;
    int64_t last_used = 0;
  };

  [[nodiscard]] bool short_queries(const StepItem& item) const;
  // The shape that the step is padded to; n_seqs is 0 when it is not.
  [[nodiscard]] Shape shape_of(std::span<const StepItem> items) const;
  // Where the index arrays of a step lie within host_ and device_: close together, so that little is uploaded, and for a padded step always
  // at the same places.
  struct Offsets {
    size_t tokens = 0, positions = 0, slots = 0, q_start = 0, kv_len = 0, logit_rows = 0, block_table = 0;
    Offsets() = default;
    Offsets(int n_rows, int n_seqs, int n_logits) {
      const auto T = static_cast<size_t>(n_rows), S = static_cast<size_t>(n_seqs);
      positions = tokens + T;
      slots = positions + T;
      q_start = slots + T;
      kv_len = q_start + S + 1;
      logit_rows = kv_len + S;
      block_table = logit_rows + static_cast<size_t>(n_logits);
    }
  };

  // `writes`: the rows go to the cache.
  void lay_out(std::span<const StepItem> items, const Shape& shape, bool writes, StepResult& result);
  void pad(const Shape& shape, int& row, int& n_seqs, int& n_logits, int table_cols);
  void set_views(int n_rows, int n_seqs, int n_logits, int table_cols);
  void upload(View drawn = {});
  void forward();
  [[nodiscard]] View hidden() const;  // of the last step's rows
  void run(const Shape& shape);
  void record(const Shape& shape);

  Ops& ops_;
  const Decoder& decoder_;
  KvCache& cache_;
  RunnerLimits limits_;
  MlaForm form_;
  bool pads_, replays_;
  int max_blocks_;
  Offsets at_;                  // of the last step
  std::vector<int> host_;       // all index arrays of the batch, one after the other
  Buffer device_;               // the same on the device
  std::vector<int> item_rows_;  // of the last step: each item's first row
  Buffer hidden_;               // f32 [max_tokens, hidden], when there is a prediction layer
  Buffer further_[2];           // f32 [max_seqs, hidden]: what predict_further() reads and replaces, by turns
  View predicted_;              // the hidden states that the prediction layer has left behind last
  Buffer logits_;               // f32 [max_logits, vocab]
  Batch batch_;
  std::map<Shape, Recorded> recorded_;  // shapes that have run, with their graphs if they have one
  int64_t n_steps_ = 0, n_replayed_ = 0;
  int n_graphs_ = 0;
  std::string graph_problem_;
};

}  // namespace cachalot
