// CpuOps: feed-forward networks, one or a mixture of experts, for many tokens on tiles of bf16.
//
// Rows of x become tiles once per expert that sees them, the gated products write the tiles of the next product, and the results of the
// experts are added to y as they come: a task owns a range of y's columns and passes all experts in one order, so nothing is stored in
// between and a row's sum does not depend on the number of threads.
#include <algorithm>

#include "cpu/cpu_ops_impl.h"

namespace cachalot::cpu {
namespace {

constexpr int kTokensAtOnce = 2048;  // bounds the memory for tiles: about 50 KB per token of DeepSeek-V2-Lite
constexpr int kTasksPerWorker = 16, kBlocksPerWorker = 3;

}  // namespace

// One expert and the rows that it sees.
struct ExpertRun {
  const CpuPacked *up = nullptr, *down = nullptr;
  int up_matrix = 0, down_matrix = 0;
  int n_rows = 0;
  const float** in = nullptr;      // [n_rows] of x
  float** out = nullptr;           // [n_rows] of y
  const float* factors = nullptr;  // [n_rows]; null: the result is stored, not added
  uint8_t *tiles = nullptr, *h = nullptr;

  [[nodiscard]] int n_tiles() const { return tiles_of(n_rows); }
  [[nodiscard]] int tile_rows() const { return even_tile_rows(n_rows); }
  [[nodiscard]] size_t tile_row_bytes() const { return static_cast<size_t>(up->padded_in / kChunk) * kTileBytes; }
  [[nodiscard]] int inner() const { return down->in; }
  [[nodiscard]] int inner_groups() const { return inner() / kWideRows; }
};

namespace {

bool plain_wide(const CpuPacked& w) {
  return !w.needs_own_input && std::all_of(w.segments.begin(), w.segments.end(), [](const Segment& s) { return s.wide && s.bias.empty(); });
}
// Gate and up must be rows of whole groups in one codec, and so many that they are whole chunks of the next product.
bool fits_gate_up(const CpuPacked& w) {
  const int half = w.out / 2;
  if (!plain_wide(w) || half % kChunk != 0) return false;
  const Segment &gate = w.segments.front(), &up = w.segments.back();
  return w.segments.size() == 1 ||
         (w.segments.size() == 2 && gate.n_rows == half && gate.codec == up.codec && gate.block_elems == up.block_elems);
}
bool fits_down(const CpuPacked& w) { return plain_wide(w) && w.segments.size() == 1; }

}  // namespace

bool CpuOps::fits_tiles(const Linear& gate_up, const Linear& down, int n_tokens) const {
  return in_bf16(n_tokens) && fits_gate_up(packed_of(gate_up)) && fits_down(packed_of(down));
}
bool CpuOps::experts_fit_tiles(const Experts& experts, int n_tokens) const {
  return fits_tiles(experts.gate_up, experts.down, n_tokens) &&
         (!experts.shared_gate_up || fits_tiles(experts.shared_gate_up, experts.shared_down, n_tokens));
}

ExpertRun CpuOps::expert_run(const Linear& up, const Linear& down, int expert, int n_rows) {
  const auto n = static_cast<size_t>(n_rows);
  ExpertRun run{.up = &packed_of(up),
                .down = &packed_of(down),
                .up_matrix = up.first + expert,
                .down_matrix = down.first + expert,
                .n_rows = n_rows,
                .in = take<const float*>(n),
                .out = take<float*>(n)};
  const auto tiles = static_cast<size_t>(run.n_tiles());
  run.tiles = take<uint8_t>(tiles * run.tile_row_bytes());
  run.h = take<uint8_t>(tiles * static_cast<size_t>(run.inner() / kChunk) * kTileBytes);
  return run;
}
ExpertRun CpuOps::run_of_all(const Linear& up, const Linear& down, View x, View y) {
  const ExpertRun run = expert_run(up, down, 0, x.n_rows());
  for (int t = 0; t < x.n_rows(); ++t) {
    run.in[t] = x.row<float>(t);
    run.out[t] = y.row<float>(t);
  }
  return run;
}

void CpuOps::swiglu_ffn(View x, const Linear& gate_up, const Linear& down, View y) {
  if (!fits_tiles(gate_up, down, x.n_rows())) return Ops::swiglu_ffn(x, gate_up, down, y);
  CACHALOT_CHECK(x.dtype == DType::f32 && y.dtype == DType::f32 && x.n_rows() == y.n_rows() && x.n_cols() == gate_up.in &&
                 gate_up.out == 2 * down.in && y.n_cols() == down.out && gate_up.n_matrices == 1 && down.n_matrices == 1);
  for (int begin = 0; begin < x.n_rows(); begin += kTokensAtOnce) {
    const int n = std::min(kTokensAtOnce, x.n_rows() - begin);
    const Scope scope(*this);
    const ExpertRun run = run_of_all(gate_up, down, x.rows(begin, n), y.rows(begin, n));
    run_experts({&run, 1}, y.n_cols());
  }
}

void CpuOps::moe_on_tiles(View x, const Experts& experts, const Routing& routing, View y) {
  for (int begin = 0; begin < x.n_rows(); begin += kTokensAtOnce) {
    const int n = std::min(kTokensAtOnce, x.n_rows() - begin);
    const Scope scope(*this);
    const View rows = x.rows(begin, n), to = y.rows(begin, n);
    const Routing part{routing.ids.rows(begin, n), routing.weights.rows(begin, n)};
    const ExpertSlots slots = sort_slots(part, experts.gate_up.n_matrices);

    auto* const runs = take<ExpertRun>(static_cast<size_t>(experts.gate_up.n_matrices) + 1);
    size_t n_runs = 0;
    if (experts.shared_gate_up) {
      runs[n_runs++] = run_of_all(experts.shared_gate_up, experts.shared_down, rows, to);
    } else {
      for (int t = 0; t < n; ++t) std::fill_n(to.row<float>(t), to.n_cols(), 0.0f);
    }
    for (int e = 0; e < experts.gate_up.n_matrices; ++e) {
      const int first = slots.begin[e], count = slots.begin[e + 1] - first;
      if (count == 0) continue;
      ExpertRun& run = runs[n_runs++] = expert_run(experts.gate_up, experts.down, e, count);
      auto* const factors = take<float>(static_cast<size_t>(count));
      for (int i = 0; i < count; ++i) {
        const int slot = slots.order[first + i], t = slot / slots.top_k;
        run.in[i] = rows.row<float>(t);
        run.out[i] = to.row<float>(t);
        factors[i] = part.weights.row<float>(t)[slot % slots.top_k];
      }
      run.factors = factors;
    }
    run_experts({runs, n_runs}, to.n_cols());
  }
}

void CpuOps::run_experts(std::span<const ExpertRun> runs, int hidden) {
  const TileKernels& kernels = kernels_.tiles;
  // A range of one run: tiles of tokens, or groups of rows.
  struct Task {
    const ExpertRun* run;
    int begin, n;
  };
  const auto cut = [&](const auto& units_of, const auto& step_of) {
    size_t n = 0;
    for (const ExpertRun& run : runs) n += static_cast<size_t>((units_of(run) + step_of(run) - 1) / step_of(run));
    auto* const tasks = take<Task>(n);
    size_t at = 0;
    for (const ExpertRun& run : runs)
      for (int begin = 0; begin < units_of(run); begin += step_of(run))
        tasks[at++] = {&run, begin, std::min(step_of(run), units_of(run) - begin)};
    return std::span<const Task>{tasks, n};
  };

  const auto gathering = cut([](const ExpertRun& run) { return run.n_tiles(); }, [](const ExpertRun&) { return 1; });
  const auto gather = [&](int index, int) {
    const Task& task = gathering[static_cast<size_t>(index)];
    const ExpertRun& run = *task.run;
    const int first = task.begin * run.tile_rows();
    kernels.gather_bf16(run.in + first, std::min(run.tile_rows(), run.n_rows - first), run.up->padded_in,
                        run.tiles + static_cast<size_t>(task.begin) * run.tile_row_bytes());
  };
  pool_->run(static_cast<int>(gathering.size()), std::cref(gather));

  size_t most_columns = 0;
  int64_t total = 0;
  const auto group_cost = [](const ExpertRun& run) { return int64_t{run.n_tiles() + 1} * run.up->padded_in; };
  for (const ExpertRun& run : runs) {
    total += group_cost(run) * run.inner_groups();
    most_columns = std::max({most_columns, static_cast<size_t>(run.up->padded_in), static_cast<size_t>(run.down->padded_in)});
  }
  const size_t scratch_floats = kernels.scratch_bytes(static_cast<int>(most_columns)) / sizeof(float);
  const int64_t per_task = total / (pool_->size() * kTasksPerWorker) + 1;
  // Tasks take whole chunks of h, two groups, so that no two write to one line.
  const auto gating = cut([](const ExpertRun& run) { return run.inner_groups(); },
                          [&](const ExpertRun& run) {
                            return static_cast<int>(std::clamp<int64_t>(per_task / group_cost(run) / 2 * 2, 2, run.inner_groups()));
                          });
  const auto gate = [&](int index, int worker) {
    const Task& task = gating[static_cast<size_t>(index)];
    const ExpertRun& run = *task.run;
    const CpuPacked& w = *run.up;
    const Segment &first = w.segments.front(), &second = w.segments.back();
    const int row = task.begin * kWideRows, n = task.n * kWideRows;
    const WideProduct p{.y_col = row,
                        .n_tokens = run.n_rows,
                        .tiles = run.tiles,
                        .tile_rows = run.tile_rows(),
                        .scratch = reinterpret_cast<uint8_t*>(scratch(worker, scratch_floats))};
    kernels.swiglu[static_cast<int>(first.codec)](w.wide_rows(first, run.up_matrix, row, n),
                                                  w.wide_rows(second, run.up_matrix, row + (w.segments.size() == 1 ? run.inner() : 0), n),
                                                  p, run.h, run.inner() / kChunk);
  };
  pool_->run(static_cast<int>(gating.size()), std::cref(gate));

  const int groups = (hidden + kWideRows - 1) / kWideRows;
  const int step = std::max((groups + pool_->size() * kBlocksPerWorker - 1) / (pool_->size() * kBlocksPerWorker) + 1, 2) / 2 * 2;
  const auto add_up = [&](int index, int worker) {
    const int row = index * step * kWideRows, n = std::min(step * kWideRows, hidden - row);
    auto* const memory = reinterpret_cast<uint8_t*>(scratch(worker, scratch_floats));
    for (const ExpertRun& run : runs) {
      const Segment& s = run.down->segments.front();
      const WideProduct p{.y = run.out,
                          .y_col = row,
                          .n_tokens = run.n_rows,
                          .factors = run.factors,
                          .tiles = run.h,
                          .tile_rows = run.tile_rows(),
                          .scratch = memory};
      kernels.bf16[static_cast<int>(s.codec)](run.down->wide_rows(s, run.down_matrix, row, n), p);
    }
  };
  pool_->run((groups + step - 1) / step, std::cref(add_up));
}

}  // namespace cachalot::cpu
