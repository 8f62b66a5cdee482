// Calibration on a device whose memory the host cannot reach: the same numbers as on one whose memory it can.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include "ops/ref_ops.h"
#include "ops/staged_ops.h"
#include "quant/imatrix_gather.h"
#include "quant/quantize_model.h"
#include "support/golden.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

// RefOps on memory that may only be touched during a call, and calls that take no other memory.
class FarOps final : public RefOps {
 public:
  FarOps() : begin_(static_cast<std::byte*>(mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {}
  ~FarOps() override { munmap(begin_, kBytes); }
  FarOps(const FarOps&) = delete;
  FarOps& operator=(const FarOps&) = delete;
  [[nodiscard]] bool host_memory() const override { return false; }
  int n_calls = 0;

  Buffer alloc(size_t bytes) override {
    return {allocated_.take(bytes), [](void*) {}};
  }
  View temp(DType dtype, int rows, int cols) override {
    return View::matrix(temporary_.take(static_cast<size_t>(rows) * static_cast<size_t>(cols) * size_of(dtype)), dtype, rows, cols);
  }
  size_t temp_mark() const override { return temporary_.mark(); }
  void temp_release(size_t mark) override { temporary_.release(mark); }
  void upload(void* device, const void* host, size_t bytes) override {
    const Open open(*this, {});
    RefOps::upload(device, host, bytes);
  }
  void download(void* host, const void* device, size_t bytes) override {
    const Open open(*this, {});
    RefOps::download(host, device, bytes);
  }

  void embed(const Linear& table, View ids, View x) override {
    const Open open(*this, {ids, x});
    RefOps::embed(table, ids, x);
  }
  void rmsnorm(View x, View w, float eps, View y) override {
    const Open open(*this, {x, w, y});
    RefOps::rmsnorm(x, w, eps, y);
  }
  void add_rmsnorm(View residual, View delta, View w, float eps, View y) override {
    const Open open(*this, {residual, delta, w, y});
    RefOps::add_rmsnorm(residual, delta, w, eps, y);
  }
  void linear(View x, const Linear& w, View y, float beta) override {
    const Open open(*this, {x, y});
    RefOps::linear(x, w, y, beta);
  }
  void linear_swiglu(View x, const Linear& gate_up, View h) override {
    const Open open(*this, {x, h});
    RefOps::linear_swiglu(x, gate_up, h);
  }
  void head_linear(View x, const Linear& w, View y) override {
    const Open open(*this, {x, y});
    RefOps::head_linear(x, w, y);
  }
  void rope(View qk, View pos, const Rope& rope) override {
    const Open open(*this, {qk, pos, rope.cos_sin});
    RefOps::rope(qk, pos, rope);
  }
  void mla_prologue(const MlaPrologue& p) override {
    const Open open(*this, {p.q, p.row, p.norm, p.rope.cos_sin, p.batch->positions, p.batch->slots});
    RefOps::mla_prologue(p);
  }
  void kv_write(const KvLayer& kv, const Batch& batch, View k, View v) override {
    const Open open(*this, {batch.slots, k, v});
    RefOps::kv_write(kv, batch, k, v);
  }
  void attend(const Attn& attn, View q, View out) override {
    const Open open(*this, {attn.batch->q_start, attn.batch->kv_len, attn.batch->block_table, q, out});
    RefOps::attend(attn, q, out);
  }
  void attend_expanded(const Attn& attn, const MlaDims& dims, View q, const Linear& kv_b, View out) override {
    const Open open(*this, {attn.batch->q_start, attn.batch->kv_len, attn.batch->block_table, q, out});
    RefOps::attend_expanded(attn, dims, q, kv_b, out);
  }
  void gather_rows(View x, View ids, View y) override {
    const Open open(*this, {x, ids, y});
    RefOps::gather_rows(x, ids, y);
  }
  void scatter_add_rows(View x, View ids, View weights, View y) override {
    const Open open(*this, {x, ids, weights, y});
    RefOps::scatter_add_rows(x, ids, weights, y);
  }
  void route(View logits, View bias, const Router& router, const Routing& out) override {
    const Open open(*this, {logits, bias, out.ids, out.weights});
    RefOps::route(logits, bias, router, out);
  }
  void moe(View x, const Experts& experts, const Routing& routing, View y) override {
    const Open open(*this, {x, routing.ids, routing.weights, y});
    RefOps::moe(x, experts, routing, y);
  }
  void kv_gather(const Attn& attn, int seq, int begin, int n, View out) override {
    const Open open(*this, {attn.batch->block_table, out});
    RefOps::kv_gather(attn, seq, begin, n, out);
  }
  void attend_ragged(const RaggedChunk& chunk, View q, View latent, View kv, View out, View lse) override {
    const Open open(*this, {q, latent, kv, out, lse});
    RefOps::attend_ragged(chunk, q, latent, kv, out, lse);
  }

 private:
  static constexpr size_t kBytes = size_t{1} << 32;  // of addresses, of which few are used

  class Open {
   public:
    Open(FarOps& ops, std::initializer_list<View> views) : ops_(ops) {
      for (const View& v : views) {
        const auto* const at = static_cast<const std::byte*>(v.data);
        EXPECT_TRUE(at == nullptr || (at >= ops.begin_ && at < ops.begin_ + kBytes)) << "an array in the host's memory";
      }
      ++ops.n_calls;
      if (ops_.depth_++ == 0) ops_.protect(PROT_READ | PROT_WRITE);
    }
    ~Open() {
      if (--ops_.depth_ == 0) ops_.protect(PROT_NONE);
    }
    Open(const Open&) = delete;
    Open& operator=(const Open&) = delete;

   private:
    FarOps& ops_;
  };

  void protect(int access) { ASSERT_EQ(mprotect(begin_, next_, access), 0); }
  std::shared_ptr<void> take(size_t bytes) {
    std::byte* const at = begin_ + next_;
    next_ += (bytes + 4095) / 4096 * 4096;
    CACHALOT_CHECK(next_ <= kBytes, "{} bytes", next_);
    return {at, [](void*) {}};
  }

  std::byte* begin_;
  size_t next_ = 0;
  int depth_ = 0;
  Arena temporary_{[this](size_t bytes) { return take(bytes); }}, allocated_{[this](size_t bytes) { return take(bytes); }};
};

QuantizeReport report_of(Ops& ops, const std::filesystem::path& model, Method method) {
  const auto checkpoint = Checkpoint::open(model);
  const Config config = read_config(*checkpoint);
  Recipe recipe;
  recipe.method = method;
  recipe.scheme = {Format::int4_planar, 32, false};
  ThreadPool pool{1};
  TokenStream text{.window = 24};
  append_windows(text, read_golden(model).input_ids, 0, 0, 0);
  TokenStream held_out = text;
  LayerQuantizer quantizer(*checkpoint, config, ops, pool, recipe, text.window);
  return quantize_model(quantizer, *checkpoint, config, ops, recipe, text, held_out, {"text"}, {}, {});
}

class FarDevice : public testing::TestWithParam<std::string> {};

TEST_P(FarDevice, GivesTheSameReport) {
  const auto model = testdata("golden/" + GetParam());
  const auto near = make_ref_ops();
  FarOps far;
  const auto staged = make_staged_ops(far);
  for (const Method method : {Method::rtn, Method::awq_gptq}) {
    const QuantizeReport want = report_of(*near, model, method), got = report_of(*staged, model, method);
    ASSERT_EQ(got.matrices.size(), want.matrices.size());
    for (size_t i = 0; i < want.matrices.size(); ++i)
      EXPECT_DOUBLE_EQ(got.matrices[i].error, want.matrices[i].error) << want.matrices[i].name;
    // llama-gqa's weights make it so sure of its tokens that KL is zero.
    EXPECT_NE(want.domains.back().divergence.ppl_ratio, 1.0);
    EXPECT_DOUBLE_EQ(got.domains.back().divergence.ppl_ratio, want.domains.back().divergence.ppl_ratio);
    EXPECT_DOUBLE_EQ(got.domains.back().divergence.kl, want.domains.back().divergence.kl);
  }
  EXPECT_GT(far.n_calls, 100);
}

TEST_P(FarDevice, GathersTheSameImportance) {
  const auto model = testdata("golden/" + GetParam());
  const auto checkpoint = Checkpoint::open(model);
  const Config config = read_config(*checkpoint);
  const std::vector<int> ids = read_golden(model).input_ids;
  const auto near = make_ref_ops();
  FarOps far;
  const auto staged = make_staged_ops(far);
  const GatherOptions options{.window = 24, .head = true};
  const ImportanceMatrix want = gather_importance(*checkpoint, config, *near, ids, options),
                         got = gather_importance(*checkpoint, config, *staged, ids, options);
  ASSERT_EQ(got.entries.size(), want.entries.size());
  for (const auto& [name, entry] : want.entries) {
    EXPECT_EQ(got.entries.at(name).sums, entry.sums) << name;
    EXPECT_EQ(got.entries.at(name).counts, entry.counts) << name;
  }
  EXPECT_GT(far.n_calls, 100);
}

INSTANTIATE_TEST_SUITE_P(Golden, FarDevice, testing::Values("deepseek-v2-lite", "deepseek-v3", "llama-gqa", "qwen3"),
                         [](const auto& family) {
                           std::string name = family.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace cachalot::test
