// Every operation case on CudaOps against RefOps, in both modes; then sizes at which the tensor-core kernels take over.
#include "cuda/gpu_support.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

const std::vector<Format> kFastFormats{Format::bf16, Format::q4_k, Format::q6_k,        Format::q8_0,
                                       Format::q5_0, Format::q4_0, Format::int4_planar, Format::fp8_block};

std::vector<OpCase> large_cases() {
  std::vector<OpCase> cases;
  for (const Format format : kFastFormats) {
    for (const int rows : {1, 5, 8, 16, 24, 33, 64, 129, 300})
      cases.push_back(linear_case({.segments = {{.format = format, .out = 272, .in = 1024}}, .rows = rows}));
    cases.push_back(linear_case({.segments = {{.format = format, .out = 144, .in = 768}}, .rows = 70, .beta = 1.0f, .f32_out = true}));
    cases.push_back(linear_case({.segments = {{.format = format, .out = 8224, .in = 256}}, .rows = 3}));
    for (const int rows : {1, 17, 150}) cases.push_back(swiglu_case({.format = format, .out = 320, .in = 512}, rows));
    for (const int rows : {1, 7, 40, 100, 300})
      cases.push_back(moe_case({.label = "large",
                                .gate_up = format,
                                .down = format,
                                .shared = format,
                                .n_experts = 8,
                                .top_k = 3,
                                .hidden = 256,
                                .inner = 256,
                                .shared_inner = 512,
                                .rows = rows}));
  }
  // Many rows of experts in bf16, alone and beside another form, whose columns lie in another order; widths that no tile divides.
  for (const auto& [up, down] : {std::pair{Format::bf16, Format::bf16}, {Format::bf16, Format::q8_0}, {Format::q8_0, Format::bf16}})
    for (const int rows : {100, 300, 700})
      cases.push_back(moe_case({.label = "wide",
                                .gate_up = up,
                                .down = down,
                                .shared = Format::bf16,
                                .n_experts = 8,
                                .top_k = 3,
                                .hidden = 288,
                                .inner = 352,
                                .shared_inner = 512,
                                .rows = rows}));
  for (const auto& [up, down] : {std::pair{Format::int4_planar, Format::int4_planar},
                                 {Format::q4_0, Format::q4_0},
                                 {Format::q4_k, Format::q4_k},
                                 {Format::q4_k, Format::q6_k}})
    cases.push_back(moe_case({.label = "many rows",
                              .gate_up = up,
                              .down = down,
                              .shared = up,
                              .n_experts = 4,
                              .top_k = 2,
                              .hidden = 256,
                              .inner = 256,
                              .shared_inner = 256,
                              .rows = 900}));
  const auto int4_moe = [](const auto& s, bool add_norm) {
    return moe_case({.label = s.label,
                     .gate_up = Format::int4_planar,
                     .down = Format::int4_planar,
                     .shared = Format::int4_planar,
                     .n_experts = s.n_experts,
                     .top_k = s.top_k,
                     .hidden = s.hidden,
                     .inner = s.inner,
                     .shared_inner = s.shared,
                     .rows = s.rows,
                     .all_to = s.all_to,
                     .add_norm = add_norm,
                     .x_scale = s.x_scale});
  };
  // The same in int4 alone: experts of one and of several tiles, of few rows in the last one, and without rows; a last block of half of the
  // rows; large and small activations.
  struct ManyRows {
    const char* label;
    int rows, n_experts = 8, top_k = 3, hidden = 384, inner = 640, shared = 384, all_to = -1;
    float x_scale = 1.0f;
  };
  for (const ManyRows& s :
       {ManyRows{"many rows", 170}, ManyRows{"many rows", 400}, ManyRows{"many rows", 460, 4, 2, 2048, 384, 0},
        ManyRows{"many rows", 700, 8, 3, 512, 128, 640}, ManyRows{"many rows all to one", 500, 8, 3, 384, 384, 128, 5},
        ManyRows{"many rows to one", 601, 8, 1, 640, 256, 128, 3}, ManyRows{"many rows large", 200, 8, 3, 384, 384, 384, -1, 1e5f},
        ManyRows{"many rows small", 200, 8, 3, 384, 384, 384, -1, 1e-4f}})
    cases.push_back(int4_moe(s, s.rows == 400));
  // Few rows by a matrix of very many.
  for (const int rows : {1, 4, 7, 8})
    cases.push_back(linear_case({.segments = {{.format = Format::int4_planar, .out = 42256, .in = 512}}, .rows = rows, .f32_out = true}));
  // One row: more columns than a stage holds, uneven shares of the work, and no shared expert. int4 in groups of 128, and of 64.
  struct OneRow {
    Format format;
    int hidden, inner, shared;
  };
  for (const OneRow& s : {OneRow{Format::bf16, 2304, 448, 384}, OneRow{Format::q4_0, 2304, 448, 384},
                          OneRow{Format::int4_planar, 2304, 640, 384}, OneRow{Format::int4_planar, 2240, 448, 320}})
    for (const int shared : {0, s.shared})
      cases.push_back(moe_case({.label = "one row",
                                .gate_up = s.format,
                                .down = s.format,
                                .shared = s.format,
                                .n_experts = 16,
                                .top_k = 6,
                                .hidden = s.hidden,
                                .inner = s.inner,
                                .shared_inner = shared,
                                .rows = 1}));
  // 3 to 16 rows of 4-bit codes in one launch: experts of more rows than a list has, more and fewer tasks than blocks.
  for (const int rows : {3, 8, 9, 16})
    for (const int shared : {0, 1152})
      for (const int all_to : {-1, 3})
        cases.push_back(moe_case({.label = "few tokens",
                                  .gate_up = Format::int4_planar,
                                  .down = Format::int4_planar,
                                  .shared = Format::int4_planar,
                                  .n_experts = 16,
                                  .top_k = 4,
                                  .hidden = 1280,
                                  .inner = 896,
                                  .shared_inner = shared,
                                  .rows = rows,
                                  .all_to = all_to}));
  // Few rows of 4-bit codes: sorted within the kernel and beforehand, each number of rows per block, fewer columns than warps, and an
  // expert of more rows than a block takes.
  for (const int rows : {2, 10, 12, 18, 60})
    for (const int shared : {0, 640})
      for (const int all_to : {-1, 3})
        if (rows <= 12 || shared > 0)
          cases.push_back(moe_case({.label = "few rows",
                                    .gate_up = Format::int4_planar,
                                    .down = Format::int4_planar,
                                    .shared = Format::int4_planar,
                                    .n_experts = rows == 12 ? 24 : 16,
                                    .top_k = 6,
                                    .hidden = 2304,
                                    .inner = 384,
                                    .shared_inner = shared,
                                    .rows = rows,
                                    .all_to = all_to,
                                    .add_norm = all_to < 0}));
  // The same with finer groups: every form of each product beside another one of the shared expert's, whole numbers of rows per block
  // and others, one group of columns and several.
  struct FineRows {
    Format gate_up, down, shared_down;
    int hidden, inner, shared;
  };
  for (const FineRows& s :
       {FineRows{Format::q4_k, Format::q5_0, Format::q6_k, 2304, 384, 768},
        FineRows{Format::q4_0, Format::q8_0, Format::q4_k, 768, 128, 1280},
        FineRows{Format::q4_k, Format::q6_k, Format::q8_0, 1280, 512, 640},
        FineRows{Format::q4_1, Format::q4_0, Format::q5_0, 384, 1408, 0}, FineRows{Format::q8_0, Format::q8_0, Format::q6_k, 768, 128, 768},
        FineRows{Format::q6_k, Format::q5_0, Format::q4_0, 512, 384, 128},
        FineRows{Format::q5_0, Format::q8_0, Format::q5_0, 384, 256, 640}})
    for (const int rows : {1, 2, 4, 10, 12, 18, 33, 44})
      for (const int all_to : {-1, 3})
        if (all_to < 0 || rows >= 10)
          cases.push_back(moe_case({.label = "fine few rows",
                                    .gate_up = s.gate_up,
                                    .down = s.down,
                                    .shared = s.hidden % 256 == 0 ? Format::q4_k : Format::q4_0,
                                    .shared_down = s.shared_down,
                                    .n_experts = rows == 12 ? 24 : 16,
                                    .top_k = 6,
                                    .hidden = s.hidden,
                                    .inner = s.inner,
                                    .shared_inner = s.shared,
                                    .rows = rows,
                                    .all_to = all_to,
                                    .add_norm = all_to < 0,
                                    .x_scale = rows == 33   ? 1e4f
                                               : rows == 18 ? 1e-3f
                                                            : 1.0f}));
  // As many columns as there is room for.
  for (const auto& [hidden, inner] : {std::pair{7168, 256}, {256, 6144}})
    cases.push_back(moe_case({.label = "fine few rows",
                              .gate_up = Format::q4_k,
                              .down = Format::q8_0,
                              .top_k = 6,
                              .hidden = hidden,
                              .inner = inner,
                              .rows = 16}));
  // Some rows of 4-bit codes: each number of rows per tile, experts of one and of more tiles, without rows and with one, odd numbers of
  // groups, a last block of half of the rows; large and small activations.
  struct SomeRows {
    const char* label;
    int rows, n_experts = 16, top_k = 6, hidden = 2304, inner = 384, shared = 640, all_to = -1;
    float x_scale = 1.0f;
  };
  for (const SomeRows& s :
       {SomeRows{"some rows", 30}, SomeRows{"some rows", 40}, SomeRows{"some rows", 50}, SomeRows{"some rows", 70},
        SomeRows{"some rows", 90, 16, 6, 640, 256, 384}, SomeRows{"some rows", 130, 16, 6, 384, 128, 0},
        SomeRows{"some rows", 140, 16, 6, 384, 640, 128}, SomeRows{"some rows all to one", 60, 16, 6, 2304, 384, 640, 3},
        SomeRows{"some rows all to one", 130, 16, 6, 384, 384, 0, 5}, SomeRows{"some rows to one", 201, 8, 1, 384, 128, 128, 3},
        SomeRows{"some rows large", 60, 16, 6, 640, 384, 640, -1, 1e5f}, SomeRows{"some rows small", 60, 16, 6, 640, 384, 640, -1, 1e-4f}})
    cases.push_back(int4_moe(s, s.rows == 70));
  cases.push_back(moe_case({.label = "mixed",
                            .gate_up = Format::q4_k,
                            .down = Format::q5_0,
                            .shared = Format::q6_k,
                            .n_experts = 16,
                            .top_k = 6,
                            .hidden = 256,
                            .inner = 96,
                            .shared_inner = 256,
                            .rows = 9}));
  cases.push_back(moe_case({.label = "one expert",
                            .gate_up = Format::bf16,
                            .down = Format::bf16,
                            .shared = Format::bf16,
                            .n_experts = 16,
                            .top_k = 2,
                            .hidden = 256,
                            .inner = 128,
                            .shared_inner = 128,
                            .rows = 200,
                            .all_to = 3}));
  const KvLayout mla{.heads = 1, .k_dim = 576, .v_dim = 512, .v_is_k_prefix = true, .format = KvFormat::bf16, .block_tokens = 16};
  const MlaDims dims{.n_heads = 16, .nope = 128, .rope_dim = 64, .v_dim = 128, .kv_rank = 512};
  KvLayout wide = mla;
  wide.block_tokens = 64;
  cases.push_back(attend_case(
      {.label = "mla decode", .heads = 16, .layout = mla, .sequences = {{1, 700}, {1, 1}, {1, 64}, {1, 65}, {1, 0}, {3, 130}}}));
  cases.push_back(attend_case({.label = "mla one long", .heads = 16, .layout = wide, .sequences = {{1, 1500}}}));
  cases.push_back(attend_case({.label = "mla 24 heads", .heads = 24, .layout = mla, .sequences = {{1, 200}, {2, 90}}}));
  for (const int block_tokens : {8, 16, 32, 64}) {
    KvLayout l = mla;
    l.block_tokens = block_tokens;
    for (const int heads : {64, 96, 128})
      cases.push_back(attend_case({.label = "mla wide",
                                   .heads = heads,
                                   .layout = l,
                                   .sequences = {{1, 700}, {1, 1}, {1, 64}, {1, 65}, {1, 0}, {2, 129}, {1, 193}, {1, 1}, {1, 1}, {1, 1}}}));
    l.format = KvFormat::fp8;
    cases.push_back(
        attend_case({.label = "mla fp8", .heads = 16, .layout = l, .sequences = {{1, 700}, {1, 1}, {1, 64}, {1, 65}, {1, 0}, {3, 130}}}));
    cases.push_back(attend_case({.label = "mla fp8 24 heads", .heads = 24, .layout = l, .sequences = {{1, 1200}, {2, 90}}}));
  }
  // Enough rows that no context is cut into parts.
  for (const KvFormat format : {KvFormat::bf16, KvFormat::fp8}) {
    KvLayout l = wide;
    l.format = format;
    std::vector<SequenceShape> many;
    for (int i = 0; i < 70; ++i) many.push_back({1, 1 + 37 * i % 331});
    for (const int heads : {16, 128}) cases.push_back(attend_case({.label = "mla many", .heads = heads, .layout = l, .sequences = many}));
  }
  cases.push_back(attend_expanded_case({.label = "flash", .heads = 16, .layout = mla, .sequences = {{150, 150}, {20, 200}, {3, 40}}}, dims,
                                       Format::bf16));
  for (const int dim : {64, 128}) {
    const KvLayout gqa{.heads = 2, .k_dim = dim, .v_dim = dim, .v_is_k_prefix = false, .format = KvFormat::bf16, .block_tokens = 16};
    cases.push_back(attend_case(
        {.label = "gqa prompt", .heads = 6, .layout = gqa, .sequences = {{140, 140}, {3, 50}, {1, 7}, {40, 200}, {1, 0}, {17, 17}}}));
    for (const int block_tokens : {8, 64}) {
      KvLayout l = gqa;
      l.block_tokens = block_tokens;
      for (const int heads : {2, 6, 16, 18})  // one per KV head to more than a block takes
        cases.push_back(attend_case({.label = "gqa decode",
                                     .heads = heads,
                                     .layout = l,
                                     .sequences = {{1, 700}, {1, 1}, {1, 64}, {1, 65}, {1, 0}, {3, 130}, {1, 8}, {1, 25}}}));
      cases.push_back(attend_case({.label = "gqa one long", .heads = 14, .layout = l, .sequences = {{1, 1500}}}));
    }
    std::vector<SequenceShape> many;  // enough rows that no context is cut into parts
    for (int i = 0; i < 200; ++i) many.push_back({1, 1 + 37 * i % 331});
    cases.push_back(attend_case({.label = "gqa many", .heads = 8, .layout = gqa, .sequences = many}));
  }
  return cases;
}

class CudaCase : public testing::TestWithParam<std::tuple<DType, OpCase>> {};

TEST_P(CudaCase, AgreesWithReference) {
  SKIP_WITHOUT_GPU();
  const DType activation = std::get<0>(GetParam());
  OpCase c = std::get<1>(GetParam());
  // In bf16 more is rounded than the case's inputs and outputs: weights without a record form, the expanded keys and values, the experts'
  // inner rows. NMSE of a single output is no mean.
  if (activation == DType::bf16) c.slack *= c.op == "linear" && c.quantised ? 3.0 : c.op == "attend_expanded" || c.op == "moe" ? 1.5 : 1.0;
  const CaseResult result = run_case(c, gpu(activation), reference());
  EXPECT_TRUE(result.ok) << result.text;
}

std::string test_name(const testing::TestParamInfo<std::tuple<DType, OpCase>>& param) {
  std::string name = std::get<1>(param.param).name;
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  return std::string(name_of(std::get<0>(param.param))) + "_" + name + "_" + std::to_string(param.index);
}
INSTANTIATE_TEST_SUITE_P(Shared, CudaCase, testing::Combine(testing::Values(DType::bf16, DType::f32), testing::ValuesIn(op_cases())),
                         test_name);
INSTANTIATE_TEST_SUITE_P(Large, CudaCase, testing::Combine(testing::Values(DType::bf16), testing::ValuesIn(large_cases())), test_name);

// Rounded activations: an error of 2^-5 each at most, about 2.6% in the mean.
TEST(CudaOps, Fp8ActivationsStayWithinTheirBound) {
  SKIP_WITHOUT_GPU();
  const auto ops = make_cuda_ops({.fp8_activations = true});
  for (const int out : {256, 272})
    for (const int rows : {192, 300, 301}) {
      OpCase c = linear_case({.segments = {{.format = Format::fp8_block, .out = out, .in = 640}}, .rows = rows});
      c.slack = 1.4;
      const CaseResult result = run_case(c, *ops, reference(), {.fp8_activations = true});
      EXPECT_TRUE(result.ok) << result.text;
    }
  OpCase c =
      linear_case({.segments = {{.format = Format::fp8_block, .out = 256, .in = 512}, {.format = Format::fp8_block, .out = 144, .in = 512}},
                   .rows = 256,
                   .beta = 1.0f,
                   .f32_out = true});
  c.slack = 1.4;
  const CaseResult result = run_case(c, *ops, reference(), {.fp8_activations = true});
  EXPECT_TRUE(result.ok) << result.text;
}

TEST(CudaOps, RefusesADeviceThatIsNotThere) {
  SKIP_WITHOUT_GPU();
  const std::string message = error_of([] { (void)make_cuda_ops({.device = 99}); });
  EXPECT_NE(message.find("device 99"), std::string::npos) << message;
}

TEST(CudaOps, CheckModeRefusesAllocationInAForwardPass) {
  SKIP_WITHOUT_GPU();
  const auto ops = make_cuda_ops({.check = true});
  (void)ops->alloc(16);
  const Scope scope(*ops);
  (void)ops->temp(DType::f32, 1, 1);
  const std::string message = error_of([&] { (void)ops->alloc(16); });
  EXPECT_NE(message.find("inside a forward pass"), std::string::npos) << message;
}

// A result does not depend on the other rows of its batch, as long as the same kernel serves both.
TEST(CudaOps, RowsDoNotDependOnTheirNeighbours) {
  SKIP_WITHOUT_GPU();
  Ops& ops = gpu(DType::bf16);
  for (const Format format : kFastFormats) {
    const LinearSource source = random_source({.format = format, .out = 96, .in = 512}, 5);
    const Linear w = ops.pack({&source, 1});
    const auto values = random_floats(24 * 512, 7);
    CaseTensor x(ops, DType::bf16, 24, 512), together(ops, DType::f32, 24, 96), alone(ops, DType::f32, 1, 96);
    x.set(values);
    ops.linear(x.view(), w, together.view());
    const auto all = together.values();
    for (const int row : {0, 9, 23}) {
      ops.linear(x.view().rows(row, 1), w, alone.view());
      const auto one = alone.values();
      for (size_t i = 0; i < one.size(); ++i)
        ASSERT_EQ(one[i], all[static_cast<size_t>(row) * 96 + i]) << info(format).name << " row " << row;
    }
  }
}

TEST(CudaOps, ReplayedGraphEqualsEagerCalls) {
  SKIP_WITHOUT_GPU();
  Ops& ops = gpu(DType::bf16);
  const OpCase c = moe_case({.label = "graph",
                             .gate_up = Format::q4_k,
                             .down = Format::q8_0,
                             .shared = Format::bf16,
                             .n_experts = 8,
                             .top_k = 2,
                             .hidden = 256,
                             .inner = 256,
                             .shared_inner = 256,
                             .rows = 40});
  const CaseInstance instance = c.prepare(ops, DType::bf16);
  instance.call();
  const auto eager = instance.outputs[0].tensor->values();
  const auto graph = ops.capture(instance.call);
  instance.outputs[0].tensor->set(std::vector<float>(eager.size(), -1.0f));
  graph->launch();
  EXPECT_EQ(instance.outputs[0].tensor->values(), eager);
}

}  // namespace
}  // namespace cachalot::test
