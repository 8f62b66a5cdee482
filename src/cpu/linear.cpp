// CpuOps: products. Jobs are cut into tasks of whole row groups; a task multiplies few rows of x by decoding weights in registers, and
// many by decoding a panel of weights once into the worker's second-level cache. Both give the same bits: see isa/products.h.
#include <algorithm>
#include <cstring>

#include "cpu/cpu_ops_impl.h"

namespace cachalot::cpu {
namespace {

constexpr int64_t kPanelFloats = 64 * 1024;  // 256 KiB: a quarter of the smallest second-level cache among server cores of today
constexpr int kMaxPanelRows = 64;
constexpr int64_t kLeastPerTask = 64 * 1024;  // weights; a microsecond or more, above the cost of handing a task out
constexpr int kTasksPerWorker = 16;           // room to even out workers that the system slows down
// Tokens from which tiles beat registers, and from which opening weights to bf16 pays.
constexpr int kTileTokens = 24, kBf16Tokens = 32;

void check_rows(const View& x, const View& y) {
  CACHALOT_CHECK(x.dtype == DType::f32 && y.dtype == DType::f32, "{} -> {}", name_of(x.dtype), name_of(y.dtype));
  CACHALOT_CHECK(x.n_rows() == y.n_rows(), "{} -> {} rows", x.n_rows(), y.n_rows());
}

// Rows that a task of `halves` jobs may take in step: both halves must begin whole groups.
bool halves_are_groups(const CpuPacked& w) {
  const int half = w.out / 2;
  if (w.segments.size() == 1) return half % (w.any_wide ? kWideRows : kGroupRows) == 0;
  return w.segments.size() == 2 && w.segments[0].n_rows == half;
}

int panel_rows(const CpuPacked& w) {
  const auto fitting = static_cast<int>(std::min<int64_t>(kPanelFloats / w.padded_in, kMaxPanelRows));
  return std::max(fitting / kGroupRows, 1) * kGroupRows;
}

}  // namespace

float* const* CpuOps::rows_of(const View& x) {
  auto** rows = take<float*>(static_cast<size_t>(x.n_rows()));
  for (int t = 0; t < x.n_rows(); ++t) rows[t] = x.row<float>(t);
  return rows;
}

const QuantisedRow* CpuOps::quantise(const float* const* x, int n_tokens, int n) {
  const auto chunks = static_cast<size_t>(n / kChunk), scales = (chunks + kScaleChunks - 1) / kScaleChunks;
  const size_t row_bytes = (chunks * sizeof(ActivationChunk) + scales * sizeof(float) + 63) / 64 * 64;
  auto* const rows = take<QuantisedRow>(static_cast<size_t>(n_tokens));
  auto* const memory = take<uint8_t>(row_bytes * static_cast<size_t>(n_tokens));
  const auto task = [&](int t, int) {
    auto* const to = reinterpret_cast<ActivationChunk*>(memory + static_cast<size_t>(t) * row_bytes);
    auto* const scale = reinterpret_cast<float*>(to + chunks);
    kernels_.wide.quantise(x[t], n, to, scale);
    rows[t] = {.chunks = to, .scale = scale};
  };
  constexpr int64_t kSmall = 65536;
  parallel(n_tokens, static_cast<int64_t>(n_tokens) * n < kSmall, task);
  return rows;
}

bool CpuOps::in_bf16(int n_tokens) const { return bf16_prompts_ && kernels_.tiles.gemm_bf16 != nullptr && n_tokens >= kBf16Tokens; }

const float* CpuOps::pack_tokens(const float* const* x, int n_tokens, int n) {
  const int block = kernels_.wide.block_tokens;
  auto* const packed = take<float>(static_cast<size_t>(n_tokens) * static_cast<size_t>(n));
  const auto task = [&](int i, int) {
    const int first = i * block;
    kernels_.wide.pack_tokens(x + first, std::min(block, n_tokens - first), n, packed + static_cast<int64_t>(first) * n);
  };
  constexpr int64_t kSmall = 65536;
  parallel((n_tokens + block - 1) / block, static_cast<int64_t>(n_tokens) * n < kSmall, task);
  return packed;
}

// The tiles of an input whose rows, and for wide segments their rounded form, are known.
void CpuOps::lay_out_tiles(const Segment& s, int n_tokens, int n, Input& input) {
  const TileKernels& tiles = kernels_.tiles;
  const int n_tiles = tiles_of(n_tokens), chunks = n / kChunk, tile_rows = input.bf16 && s.wide ? even_tile_rows(n_tokens) : kTileTokenRows;
  const size_t tile_bytes = static_cast<size_t>(chunks) * kTileBytes, tile_sums = static_cast<size_t>(chunks) * kTileTokenRows;
  auto* const memory = take<uint8_t>(static_cast<size_t>(n_tiles) * tile_bytes);
  float* const sums = input.bf16 ? nullptr : take<float>(static_cast<size_t>(n_tiles) * tile_sums);
  const auto task = [&](int i, int) {
    const int first = i * tile_rows, rows = std::min(tile_rows, n_tokens - first);
    uint8_t* const to = memory + static_cast<size_t>(i) * tile_bytes;
    if (!input.bf16) {
      tiles.gather_bytes(input.quantised + first, rows, n, to, sums + static_cast<size_t>(i) * tile_sums);
    } else if (s.wide) {
      tiles.gather_bf16(input.rows + first, rows, n, to);
    } else {
      tiles.gather_pairs(input.rows + first, rows, n, to);
    }
  };
  constexpr int64_t kSmall = 65536;
  parallel(n_tiles, static_cast<int64_t>(n_tokens) * n < kSmall, task);
  input.tiles = memory;
  input.sums = sums;
}

const Input* CpuOps::inputs_of(const CpuPacked& w, const float* const* x, int n_tokens, const QuantisedRow* known) {
  const auto n = static_cast<size_t>(n_tokens);
  auto* const inputs = take<Input>(w.segments.size());
  const float* const* plain = w.padded_in == w.in ? x : nullptr;  // of segments without a permutation
  const QuantisedRow* plain_quantised = known;
  for (size_t s = 0; s < w.segments.size(); ++s) {
    const auto& perm = w.segments[s].perm;
    const float* const* from = plain;
    if (from == nullptr || !perm.empty()) {
      const auto width = static_cast<size_t>(w.padded_in);
      float* const copy = take<float>(n * width);
      const auto** rows = take<const float*>(n);
      for (size_t t = 0; t < n; ++t) {
        float* const to = copy + t * width;
        rows[t] = to;
        for (int k = 0; k < w.in; ++k) to[k] = x[t][perm.empty() ? k : perm[static_cast<size_t>(k)]];
        std::fill(to + w.in, to + w.padded_in, 0.0f);
      }
      from = rows;
      if (perm.empty()) plain = rows;
    }
    const bool wide = w.segments[s].wide, rounds = w.segments[s].rounds_activations();
    const bool on_tiles = kernels_.tiles.gather_bytes != nullptr && n_tokens >= kTileTokens;
    inputs[s] = {.rows = from, .bf16 = in_bf16(n_tokens) && w.segments[s].codec != Codec::f32};
    if (wide && !rounds && !inputs[s].bf16 && n_tokens > kernels_.wide.few_tokens) {
      const Input* const same =
          std::find_if(inputs, inputs + s, [&](const Input& other) { return other.packed != nullptr && other.rows == from; });
      inputs[s].packed = same != inputs + s ? same->packed : pack_tokens(from, n_tokens, w.padded_in);
    }
    if (rounds && !inputs[s].bf16) {
      if (!perm.empty()) {
        inputs[s].quantised = quantise(from, n_tokens, w.padded_in);
      } else {
        if (plain_quantised == nullptr) plain_quantised = quantise(from, n_tokens, w.padded_in);
        inputs[s].quantised = plain_quantised;
      }
    }
    if (inputs[s].bf16 || (rounds && on_tiles)) {
      const Input* const same = std::find_if(inputs, inputs + s, [&](const Input& other) {
        return other.tiles != nullptr && other.rows == from && other.bf16 == inputs[s].bf16 &&
               w.segments[static_cast<size_t>(&other - inputs)].wide == wide;
      });
      if (same != inputs + s) {
        inputs[s] = *same;
      } else {
        lay_out_tiles(w.segments[s], n_tokens, w.padded_in, inputs[s]);
      }
    }
  }
  return inputs;
}

size_t CpuOps::panel_floats(const CpuPacked& w) const {
  const size_t panel = static_cast<size_t>(panel_rows(w)) * static_cast<size_t>(w.padded_in);
  return std::max(panel, kernels_.wide.scratch_bytes / sizeof(float));
}
size_t CpuOps::product_floats(const CpuPacked& w) const {
  const size_t panel = panel_floats(w);
  return panel + (kernels_.tiles.scratch_bytes != nullptr ? kernels_.tiles.scratch_bytes(w.padded_in) / sizeof(float) : 0);
}

void CpuOps::multiply(const Job& job, const Segment& s, int segment, int row, int n, float* const* y, int y_col, float beta, int worker) {
  const CpuPacked& w = *job.w;
  const Input& x = job.x[segment];
  const auto codec = static_cast<int>(s.codec);
  const auto bias = [&](int r) { return s.bias.empty() ? nullptr : s.bias.data() + r; };
  const int step = panel_rows(w);
  const bool decodes = !s.wide && (x.tiles != nullptr || job.n_tokens > kernels_.gemv_max_tokens);
  float* const panel = decodes || x.tiles != nullptr || x.packed != nullptr ? scratch(worker, product_floats(w)) : nullptr;
  WideProduct product{.x = x.quantised, .rows = x.rows, .packed = x.packed};
  product.y = y;
  product.y_col = y_col;
  product.n_tokens = job.n_tokens;
  product.bias = bias(row);
  product.beta = beta;
  product.tiles = x.tiles;
  if (x.bf16) product.tile_rows = even_tile_rows(job.n_tokens);
  product.sums = x.sums;
  product.scratch = reinterpret_cast<uint8_t*>(x.tiles != nullptr ? panel + panel_floats(w) : panel);
  if (s.wide) {
    const auto& products = x.tiles == nullptr ? kernels_.wide.product : x.bf16 ? kernels_.tiles.bf16 : kernels_.tiles.bytes;
    products[codec](w.wide_rows(s, job.matrix, row, n), product);
    return;
  }
  Product plain{.x = x.rows, .y = y, .y_col = y_col, .n_tokens = job.n_tokens, .bias = bias(row), .beta = beta};
  if (!decodes) {
    kernels_.gemv[codec](w.rows(s, job.matrix, row, n), plain);
    return;
  }
  for (int r = 0; r < n; r += step) {
    const int rows = std::min(step, n - r);
    kernels_.decode[codec](w.rows(s, job.matrix, row + r, rows), panel, w.padded_in);
    plain.y_col = product.y_col = y_col + r;
    plain.bias = product.bias = bias(row + r);
    const Panel decoded{.data = panel, .stride = w.padded_in * static_cast<int64_t>(sizeof(float)), .n_rows = rows, .n_cols = w.padded_in};
    if (x.tiles != nullptr) {
      kernels_.tiles.gemm_bf16(decoded, product);
    } else {
      kernels_.gemm[0](decoded, plain);
    }
  }
}

// Calls task(job, first group, groups, worker) so that the ranges of each job cover its groups of 16 rows: of all segments one after the
// other, or with `halves` of one half. Of many tokens a task takes pairs of groups: tiles of bf16 multiply two in the time of one, and
// for the second of two the tokens lie in the first cache.
template <typename Task>
void CpuOps::run_jobs(std::span<const Job> jobs, bool halves, const Task& task) {
  const auto groups_of = [&](const Job& job) { return halves ? (job.w->out / 2 + kWideRows - 1) / kWideRows : job.w->n_groups; };
  // Passes over the weights' numbers, in which a tile of tokens counts as one.
  const auto group_cost = [&](const Job& job) {
    const int64_t tiles = (job.n_tokens + kernels_.gemv_max_tokens - 1) / kernels_.gemv_max_tokens;
    return tiles * kWideRows * job.w->padded_in * (halves ? 2 : 1);
  };
  int64_t total = 0;
  for (const Job& job : jobs) total += group_cost(job) * groups_of(job);
  const int64_t per_task = std::max(total / (pool_->size() * kTasksPerWorker), kLeastPerTask);
  int* const first_task = take<int>(jobs.size() + 1);
  int* const groups_per_task = take<int>(jobs.size());
  first_task[0] = 0;
  for (size_t j = 0; j < jobs.size(); ++j) {
    const int groups = groups_of(jobs[j]), unit = jobs[j].n_tokens >= kBf16Tokens ? 2 : 1;
    const auto wanted = static_cast<int>(std::clamp<int64_t>(per_task / group_cost(jobs[j]), 1, std::max(groups, 1)));
    groups_per_task[j] = std::max(wanted / unit, 1) * unit;
    first_task[j + 1] = first_task[j] + (groups + groups_per_task[j] - 1) / groups_per_task[j];
  }
  const auto run = [&](int index, int worker) {
    const size_t j = static_cast<size_t>(std::upper_bound(first_task, first_task + jobs.size() + 1, index) - first_task) - 1;
    const int begin = (index - first_task[j]) * groups_per_task[j];
    task(jobs[j], begin, std::min(groups_per_task[j], groups_of(jobs[j]) - begin), worker);
  };
  pool_->run(first_task[jobs.size()], std::cref(run));
}

void CpuOps::run_products(std::span<const Job> jobs, float beta) {
  run_jobs(jobs, false, [&](const Job& job, int group, int n_groups, int worker) {
    int segment = 0;
    for (const Segment& s : job.w->segments) {
      const int n = std::min(n_groups, s.n_groups - group);
      if (n > 0) {
        const int row = group * kWideRows, rows = std::min(n * kWideRows, s.n_rows - row);
        multiply(job, s, segment, row, rows, job.y, s.first_row + row, beta, worker);
        n_groups -= n;
        group += n;
      }
      if (n_groups == 0) return;
      group -= s.n_groups;
      ++segment;
    }
  });
}

// y[t][r] = silu(gate) * up. The gate goes to y itself, the other half through a buffer of the worker.
void CpuOps::run_swiglu(std::span<const Job> jobs) {
  run_jobs(jobs, true, [&](const Job& job, int group, int n_groups, int worker) {
    const CpuPacked& w = *job.w;
    const int half = w.out / 2;
    const Segment &gate = w.segments.front(), &up = w.segments.back();
    const int up_segment = static_cast<int>(w.segments.size()) - 1, up_row = w.segments.size() == 1 ? half : 0;
    const int end = std::min((group + n_groups) * kWideRows, half);
    const auto n_tokens = static_cast<size_t>(job.n_tokens);
    for (int row = group * kWideRows; row < end; row += kMaxPanelRows) {
      const int n = std::min(kMaxPanelRows, end - row);
      multiply(job, gate, 0, row, n, job.y, row, 0.0f, worker);
      // Behind what multiply uses: row pointers, then rows.
      const size_t panel = product_floats(w);
      constexpr size_t kPointer = 2;  // floats that a pointer takes
      static_assert(sizeof(float*) == kPointer * sizeof(float));
      float* const memory = scratch(worker, panel + n_tokens * (kMaxPanelRows + kPointer)) + panel;
      auto** const rows = reinterpret_cast<float**>(memory);
      float* const values = memory + n_tokens * kPointer;
      for (size_t t = 0; t < n_tokens; ++t) rows[t] = values + t * kMaxPanelRows;
      multiply(job, up, up_segment, up_row + row, n, rows, 0, 0.0f, worker);
      for (size_t t = 0; t < n_tokens; ++t) kernels_.silu_mul(job.y[t] + row, rows[t], n, job.y[t] + row);
    }
  });
}

// The same for any jobs: where a half does not begin a group, both halves are computed first.
void CpuOps::run_swiglu_jobs(std::span<const Job> jobs) {
  if (std::all_of(jobs.begin(), jobs.end(), [](const Job& job) { return halves_are_groups(*job.w); })) return run_swiglu(jobs);
  for (const Job& job : jobs) {
    const Scope scope(*this);
    const View both = temp(DType::f32, job.n_tokens, job.w->out);
    Job product = job;
    product.y = rows_of(both);
    run_products({&product, 1}, 0.0f);
    const int half = job.w->out / 2;
    for (int t = 0; t < job.n_tokens; ++t) kernels_.silu_mul(both.row<float>(t), both.row<float>(t) + half, half, job.y[t]);
  }
}

void CpuOps::linear(View x, const Linear& w, View y, float beta) {
  const CpuPacked& packed = packed_of(w);
  check_rows(x, y);
  CACHALOT_CHECK(w.n_matrices == 1 && x.n_cols() == w.in && y.n_cols() == w.out, "{} x [{}, {}] -> {}", x.n_cols(), w.out, w.in,
                 y.n_cols());
  if (x.n_rows() == 0) return;
  const Scope scope(*this);
  const Job job{.w = &packed, .matrix = w.first, .n_tokens = x.n_rows(), .x = inputs_of(packed, rows_of(x), x.n_rows()), .y = rows_of(y)};
  run_products({&job, 1}, beta);
}

void CpuOps::linear_swiglu(View x, const Linear& gate_up, View h) {
  const CpuPacked& packed = packed_of(gate_up);
  check_rows(x, h);
  CACHALOT_CHECK(gate_up.n_matrices == 1 && gate_up.out % 2 == 0 && x.n_cols() == gate_up.in && h.n_cols() == gate_up.out / 2);
  if (x.n_rows() == 0) return;
  const Scope scope(*this);
  const Job job{
      .w = &packed, .matrix = gate_up.first, .n_tokens = x.n_rows(), .x = inputs_of(packed, rows_of(x), x.n_rows()), .y = rows_of(h)};
  run_swiglu_jobs({&job, 1});
}

void CpuOps::head_linear(View x, const Linear& w, View y) {
  const CpuPacked& packed = packed_of(w);
  const int heads = w.n_matrices, width = x.n_cols() / heads, tail = width - w.in, n_tokens = x.n_rows();
  check_rows(x, y);
  CACHALOT_CHECK(tail >= 0 && x.n_cols() == heads * width && y.n_cols() == heads * (w.out + tail), "{} heads of {} -> {}: rows of {} -> {}",
                 heads, w.in, w.out, x.n_cols(), y.n_cols());
  if (n_tokens == 0) return;
  const Scope scope(*this);
  Job* const jobs = take<Job>(static_cast<size_t>(heads));
  for (int h = 0; h < heads; ++h) {
    const auto** from = take<const float*>(static_cast<size_t>(n_tokens));
    auto** to = take<float*>(static_cast<size_t>(n_tokens));
    for (int t = 0; t < n_tokens; ++t) {
      from[t] = x.row<float>(t) + h * width;
      to[t] = y.row<float>(t) + h * (w.out + tail);
      std::copy_n(from[t] + w.in, tail, to[t] + w.out);
    }
    jobs[h] = {.w = &packed, .matrix = w.first + h, .n_tokens = n_tokens, .x = inputs_of(packed, from, n_tokens), .y = to};
  }
  run_products({jobs, static_cast<size_t>(heads)}, 0.0f);
}

}  // namespace cachalot::cpu
