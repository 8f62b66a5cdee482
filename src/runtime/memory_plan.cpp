// Measuring what a step and its graphs take, and what is left.
#include "runtime/memory_plan.h"

#include <algorithm>
#include <limits>

#include "base/error.h"

namespace cachalot {
namespace {

double gib(size_t bytes) { return static_cast<double>(bytes) / static_cast<double>(size_t{1} << 30); }
size_t less(size_t a, size_t b) { return a > b ? a - b : 0; }

// Of a step on the host: the largest sets of rows that are alive together, in f32, and logits.
size_t estimated_step(const Config& c, const RunnerLimits& l) {
  const auto T = static_cast<size_t>(l.max_tokens), hidden = static_cast<size_t>(c.hidden), q = static_cast<size_t>(c.q_cols());
  const auto latent = c.mla ? static_cast<size_t>(c.n_heads) * static_cast<size_t>(2 * c.kv_rank + c.rope.dim) : size_t{0};
  const auto inner = static_cast<size_t>(std::max(c.intermediate, c.moe_intermediate * (c.router.top_k + c.n_shared)));
  const size_t row = 4 * hidden + 3 * q + latent + 2 * inner + static_cast<size_t>(c.router.top_k) * hidden;
  return (T * row + static_cast<size_t>(l.max_logits) * static_cast<size_t>(c.vocab)) * sizeof(float) + (size_t{64} << 20);
}

}  // namespace

std::string MemoryPlan::text() const {
  return fmt::format(
      "{:.2f} GiB in all, {:.0f}% of it to use: weights {:.2f}, steps {:.2f}, graphs {:.2f}, other {:.2f}, KV pages {:.2f} GiB "
      "({} of {} tokens)",
      gib(total), 100.0 * utilization, gib(weights), gib(step), gib(graphs), gib(other), gib(kv), n_blocks, block_tokens);
}

MemoryPlan plan_memory(Ops& ops, const Decoder& decoder, const RunnerLimits& limits, KvFormat format, int block_tokens,
                       double utilization) {
  if (!(utilization > 0.0 && utilization <= 1.0)) fail("memory utilization is {}, expected above 0 and at most 1", utilization);
  const Config& config = decoder.config();
  MemoryPlan plan;
  plan.utilization = utilization;
  plan.block_tokens = block_tokens;
  plan.block_bytes =
      config.kv_layout(format, block_tokens).token_bytes() * static_cast<size_t>(block_tokens) * static_cast<size_t>(decoder.n_kv_layers());
  plan.weights = decoder.weight_bytes();
  const MemorySize before = ops.memory();
  plan.total = before.total;
  plan.other = less(less(before.total, before.free), plan.weights);
  if (ops.host_memory()) {
    plan.step = estimated_step(config, limits);
  } else {
    KvCache page(ops, config, format, block_tokens, 1, decoder.n_kv_layers());
    Runner runner(ops, decoder, page, limits);
    runner.rehearse();
    {
      const Scope scope(ops);  // temporary memory that grew becomes one piece when it is next asked for
      (void)ops.temp(DType::f32, 1, 1);
    }
    const size_t free = ops.memory().free;
    plan.step = less(before.free, free);
    runner.record_graphs();
    // Steps of other contexts and lengths will want graphs of their own.
    const size_t taken = less(free, ops.memory().free);
    const auto n = static_cast<size_t>(std::max(1, runner.n_graphs()));
    plan.graphs = std::max(taken, taken / n * std::min(2 * n, static_cast<size_t>(Runner::kMaxGraphs)));
  }
  const auto budget = static_cast<size_t>(utilization * static_cast<double>(plan.total));
  plan.kv = less(budget, plan.other + plan.weights + plan.step + plan.graphs);
  plan.kv = std::min(plan.kv, less(before.free, plan.step + plan.graphs));
  plan.n_blocks = static_cast<int>(std::min<size_t>(plan.kv / plan.block_bytes, std::numeric_limits<int>::max() / block_tokens));
  const int wanted = (limits.max_sequence + block_tokens - 1) / block_tokens;
  if (plan.n_blocks < wanted)
    fail(
        "memory: {} KV pages fit, expected at least {} for one sequence of {} tokens ({:.2f} GiB): {}. A shorter context, fewer rows per "
        "step or a higher utilization would need less",
        plan.n_blocks, wanted, limits.max_sequence, gib(static_cast<size_t>(wanted) * plan.block_bytes), plan.text());
  return plan;
}

}  // namespace cachalot
