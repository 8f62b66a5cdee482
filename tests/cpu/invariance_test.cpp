// The same bits whatever the number of threads, the rows that share a batch, and the chunks that a prompt comes in.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "cpu/cpu_ops.h"
#include "ops/op_cases.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

std::vector<float> run(Ops& ops, const OpCase& c) {
  const CaseInstance instance = c.prepare(ops, DType::f32);
  instance.call();
  std::vector<float> all;
  for (const CaseOutput& out : instance.outputs) {
    const std::vector<float> values = out.tensor->values();
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}
bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// With integer weights' activations rounded to 16 bits, and in f32 (the same again where the CPU has no integer kernels).
class Invariance : public testing::TestWithParam<bool> {
 protected:
  static std::unique_ptr<Ops> make(int n_threads) {
    return make_cpu_ops({.n_threads = n_threads, .f32_products = GetParam(), .bf16_prompts = false});
  }
};
INSTANTIATE_TEST_SUITE_P(Activations, Invariance, testing::Bool(), [](const auto& param) { return param.param ? "f32" : "rounded"; });

TEST_P(Invariance, ThreadsDoNotChangeResults) {
  const auto one = make(1), two = make(2), five = make(5);
  int n_linear = 0;
  for (const OpCase& c : op_cases()) {
    if (c.op == "linear" && n_linear++ % 8 != 0) continue;  // most cases are of this one operation
    const SharedSources sources;
    const std::vector<float> expected = run(*one, c);
    EXPECT_TRUE(same_bits(run(*two, c), expected)) << c.name;
    EXPECT_TRUE(same_bits(run(*five, c), expected)) << c.name;
  }
}

TEST(Bf16Invariance, ThreadsDoNotChangeResults) {
  const auto one = make_cpu_ops({.n_threads = 1}), three = make_cpu_ops({.n_threads = 3});
  int n = 0;
  for (const OpCase& c : op_cases()) {
    if (c.op == "linear" && n++ % 8 != 0) continue;
    const SharedSources sources;
    EXPECT_TRUE(same_bits(run(*three, c), run(*one, c))) << c.name;
  }
}

// Dense f32 [rows, cols] on the host.
struct Matrix {
  std::vector<float> values;
  View view;
  Matrix(int rows, int cols, uint64_t seed) : values(random_floats(static_cast<size_t>(rows) * static_cast<size_t>(cols), seed)) {
    view = View::matrix(values.data(), DType::f32, rows, cols);
  }
};
bool same_row(const View& a, int i, const View& b, int j) { return std::memcmp(a.row<float>(i), b.row<float>(j), a.row_bytes()) == 0; }

TEST_P(Invariance, RowsOfABatchDoNotChangeEachOther) {
  const auto ops = make(2);
  for (int f = 0; f < kNumFormats; ++f) {
    const auto format = static_cast<Format>(f);
    const int in = rounded_to_blocks(format, 288);
    const LinearSource s = random_source({.format = format, .out = 72, .in = in}, 9);
    const Linear w = ops->pack({&s, 1});
    const Matrix x(16, in, 1);
    Matrix all(16, 72, 2), one(1, 72, 3), all_h(16, 36, 4), one_h(1, 36, 5);
    ops->linear(x.view, w, all.view);
    ops->linear_swiglu(x.view, w, all_h.view);
    for (int t = 0; t < 16; ++t) {
      ops->linear(x.view.rows(t, 1), w, one.view);
      ASSERT_TRUE(same_row(one.view, 0, all.view, t)) << info(format).name << " row " << t;
      ops->linear_swiglu(x.view.rows(t, 1), w, one_h.view);
      ASSERT_TRUE(same_row(one_h.view, 0, all_h.view, t)) << info(format).name << " swiglu row " << t;
    }
  }
}

TEST_P(Invariance, ExpertsOfATokenDoNotDependOnItsNeighbours) {
  const auto ops = make(2);
  constexpr int kHidden = 256, kInner = 64, kExperts = 4, kRows = 24, kTopK = 2;
  const LinearSource up = random_source({.format = Format::q4_k, .out = 2 * kInner, .in = kHidden, .n_matrices = kExperts}, 1);
  const LinearSource down = random_source({.format = Format::q8_0, .out = kHidden, .in = kInner, .n_matrices = kExperts}, 2);
  const LinearSource shared_up = random_source({.format = Format::q6_k, .out = 2 * kInner, .in = kHidden}, 3);
  const LinearSource shared_down = random_source({.format = Format::bf16, .out = kHidden, .in = kInner}, 4);
  const Experts experts{.gate_up = ops->pack({&up, 1}),
                        .down = ops->pack({&down, 1}),
                        .shared_gate_up = ops->pack({&shared_up, 1}),
                        .shared_down = ops->pack({&shared_down, 1})};
  const Matrix x(kRows, kHidden, 5), weights(kRows, kTopK, 6);
  std::vector<int> ids;
  for (int t = 0; t < kRows; ++t) {
    ids.push_back(t % 3 == 0 ? 1 : t % kExperts);
    ids.push_back((ids.back() + 1 + t % 2) % kExperts);
  }
  ids[5] = -1;
  const Routing routing{.ids = View::matrix(ids.data(), DType::i32, kRows, kTopK), .weights = weights.view};
  Matrix all(kRows, kHidden, 7), one(1, kHidden, 8);
  ops->moe(x.view, experts, routing, all.view);
  for (int t = 0; t < kRows; ++t) {
    ops->moe(x.view.rows(t, 1), experts, {routing.ids.rows(t, 1), routing.weights.rows(t, 1)}, one.view);
    ASSERT_TRUE(same_row(one.view, 0, all.view, t)) << t;
  }
}

// One sequence of kv_len tokens whose last n_q rows are queries.
struct OneSequence {
  std::vector<int> q_start, kv_len, table, host_start;
  Batch batch;
  OneSequence(int n_q, int length, int block_tokens) : q_start{0, n_q}, kv_len{length} {
    table.resize(static_cast<size_t>((length + block_tokens - 1) / block_tokens));
    std::iota(table.rbegin(), table.rend(), 0);  // blocks in reverse
    batch.n_tokens = n_q;
    batch.n_seqs = 1;
    batch.q_start = View::vector(q_start.data(), DType::i32, 2);
    batch.kv_len = View::vector(kv_len.data(), DType::i32, 1);
    batch.block_table = View::matrix(table.data(), DType::i32, 1, static_cast<int>(table.size()));
    batch.host_q_start = q_start;
    batch.host_kv_len = kv_len;
  }
};

// Results of all rows of a sequence at once, and of its last rows by themselves in chunks and on several threads.
void check_attention(const KvLayout& layout, int heads) {
  const auto ops = make_cpu_ops({.n_threads = 1, .bf16_prompts = false}), threads = make_cpu_ops({.n_threads = 4, .bf16_prompts = false});
  constexpr int kLength = 700, kBlocks = 44;
  const auto rows = static_cast<size_t>(kBlocks) * 16;
  Buffer k = ops->alloc(rows * layout.k_row_bytes()), v = ops->alloc(rows * layout.v_row_bytes());
  std::vector<int> slots(rows);
  std::iota(slots.begin(), slots.end(), 0);
  const KvLayer layer{.layout = layout, .k = k.get(), .v = layout.v_is_k_prefix ? nullptr : v.get()};
  const Matrix keys(static_cast<int>(rows), layout.heads * layout.k_dim, 1), values(static_cast<int>(rows), layout.heads * layout.v_dim, 2);
  Batch writing;
  writing.slots = View::vector(slots.data(), DType::i32, static_cast<int>(rows));
  ops->kv_write(layer, writing, keys.view, layout.v_is_k_prefix ? View{} : values.view);

  const Matrix q(kLength, heads * layout.k_dim, 3);
  Matrix whole(kLength, heads * layout.v_dim, 4), part(kLength, heads * layout.v_dim, 5);
  const auto attend = [&](Ops& on, int begin, int n, const View& out) {
    OneSequence s(n, begin + n, 16);
    s.table.resize(kBlocks);
    std::iota(s.table.rbegin(), s.table.rend(), 0);
    s.batch.block_table = View::matrix(s.table.data(), DType::i32, 1, kBlocks);
    on.attend({.kv = layer, .batch = &s.batch, .rows = {.row_begin = 0, .n_rows = n, .seq_begin = 0, .n_seqs = 1}, .scale = 0.1f},
              q.view.rows(begin, n), out);
  };
  attend(*ops, 0, kLength, whole.view);
  for (const int chunk : {1, 7, 64, 300}) {
    for (int begin = chunk == 1 ? kLength - 3 : 0; begin < kLength; begin += chunk) {
      const int n = std::min(chunk, kLength - begin);
      attend(*threads, begin, n, part.view.rows(begin, n));
      for (int i = begin; i < begin + n; ++i) ASSERT_TRUE(same_row(part.view, i, whole.view, i)) << "chunk " << chunk << " row " << i;
    }
  }
}
TEST(ContextInvariance, ChunksDoNotChangeGroupedAttention) {
  check_attention({.heads = 2, .k_dim = 40, .v_dim = 24, .format = KvFormat::f16, .block_tokens = 16}, 6);
}
TEST(ContextInvariance, ChunksDoNotChangeAttentionReadInPlace) {
  check_attention({.heads = 2, .k_dim = 64, .v_dim = 40, .format = KvFormat::bf16, .block_tokens = 16}, 6);
}
// One row of it has three queries for a KV head, as few as have kernels of their own; a chunk many.
TEST(ContextInvariance, ChunksDoNotChangeAttentionOfFewQueries) {
  check_attention({.heads = 2, .k_dim = 64, .v_dim = 48, .format = KvFormat::f16, .block_tokens = 16}, 6);
  check_attention({.heads = 2, .k_dim = 32, .v_dim = 32, .format = KvFormat::f32, .block_tokens = 16}, 8);
}
TEST(ContextInvariance, ChunksDoNotChangeAttentionOnTwoVectors) {
  check_attention({.heads = 1, .k_dim = 64, .v_dim = 64, .format = KvFormat::bf16, .block_tokens = 16}, 3);
}
TEST(ContextInvariance, ChunksDoNotChangeLatentAttention) {
  for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16})
    check_attention({.heads = 1, .k_dim = 96, .v_dim = 64, .v_is_k_prefix = true, .format = format, .block_tokens = 16}, 16);
}
// On tiles, which take f32 and f16 apart and give bf16 to one kernel or another by the number of queries.
TEST(ContextInvariance, ChunksDoNotChangeWideLatentAttention) {
  for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16})
    check_attention({.heads = 1, .k_dim = 288, .v_dim = 256, .v_is_k_prefix = true, .format = format, .block_tokens = 16}, 8);
}

// A context so long that the parts in which it is split are groups of partitions.
TEST(ContextInvariance, GroupsOfPartitionsGiveTheSameBits) {
  const auto one = make_cpu_ops({.n_threads = 1}), two = make_cpu_ops({.n_threads = 2});
  if (std::string_view(one->name()) == "cpu-scalar") GTEST_SKIP() << "slow";
  constexpr int kLength = 9000, kHeads = 128, kDim = 512, kBlock = 64;
  const KvLayout layout{.heads = 1, .k_dim = 32, .v_dim = kDim, .format = KvFormat::f32, .block_tokens = kBlock};
  const int n_rows = (kLength + kBlock - 1) / kBlock * kBlock;
  const Matrix keys(n_rows, layout.k_dim, 1), values(n_rows, kDim, 2), q(4, kHeads * layout.k_dim, 3);
  const KvLayer layer{.layout = layout, .k = keys.view.data, .v = values.view.data};
  OneSequence s(4, kLength, kBlock);
  Matrix first(4, kHeads * kDim, 4), second(4, kHeads * kDim, 5);
  const Attn attn{.kv = layer, .batch = &s.batch, .rows = {.n_rows = 4, .n_seqs = 1}, .scale = 0.1f};
  one->attend(attn, q.view, first.view);
  two->attend(attn, q.view, second.view);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(same_row(first.view, i, second.view, i)) << i;
}

}  // namespace
}  // namespace cachalot::test
