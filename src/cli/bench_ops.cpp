// Times the cases.
#include "cli/bench_ops.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/read_file.h"

namespace cachalot {
namespace {

// DeepSeek-V2-Lite (16 heads), V3 (128 heads) and dense models: one token, several rows at once, prompts.
void add_attention(std::vector<test::OpCase>& cases) {
  using namespace test;
  constexpr MlaDims kLite{.n_heads = 16, .nope = 128, .rope_dim = 64, .v_dim = 128, .kv_rank = 512};
  for (const KvFormat f : {KvFormat::f32, KvFormat::f16, KvFormat::bf16}) {
    const KvLayout latent{.heads = 1, .k_dim = 576, .v_dim = 512, .v_is_k_prefix = true, .format = f, .block_tokens = 32};
    const KvLayout eight{.heads = 8, .k_dim = 128, .v_dim = 128, .format = f, .block_tokens = 32};
    const KvLayout three{.heads = 3, .k_dim = 64, .v_dim = 64, .format = f, .block_tokens = 32};
    const std::vector<SequenceShape> one{{1, 4096}}, eight_sequences(8, SequenceShape{1, 1024}), prompt{{512, 512}}, later{{128, 2048}};
    cases.push_back(attend_case({.label = "mla/decode4096", .heads = 16, .layout = latent, .sequences = one}));
    cases.push_back(attend_case({.label = "mla/decode4096", .heads = 128, .layout = latent, .sequences = one}));
    cases.push_back(attend_case({.label = "mla/verify4x4096", .heads = 16, .layout = latent, .sequences = {{4, 4096}}}));
    cases.push_back(attend_case({.label = "mla/decode8x1024", .heads = 16, .layout = latent, .sequences = eight_sequences}));
    cases.push_back(attend_case({.label = "mla/prefill128at2048", .heads = 16, .layout = latent, .sequences = later}));
    cases.push_back(attend_case({.label = "gqa/decode4096", .heads = 32, .layout = eight, .sequences = one}));
    cases.push_back(attend_case({.label = "gqa/decode4096", .heads = 9, .layout = three, .sequences = one}));
    cases.push_back(attend_case({.label = "gqa/prefill512", .heads = 32, .layout = eight, .sequences = prompt}));
    cases.push_back(attend_case({.label = "gqa/prefill512", .heads = 9, .layout = three, .sequences = prompt}));
    cases.push_back(
        attend_expanded_case({.label = "mla/prefill512", .heads = 16, .layout = latent, .sequences = prompt}, kLite, Format::q8_0));
    cases.push_back(
        attend_expanded_case({.label = "mla/prefill128at2048", .heads = 16, .layout = latent, .sequences = later}, kLite, Format::q8_0));
  }
}

}  // namespace

std::vector<test::OpCase> bench_cases() {
  using namespace test;
  std::vector<OpCase> cases;
  for (const Format format : {Format::f32, Format::bf16, Format::f16, Format::q8_0, Format::q4_0, Format::q4_1, Format::q5_0, Format::q5_1,
                              Format::q2_k, Format::q3_k, Format::q4_k, Format::q5_k, Format::q6_k, Format::iq4_nl, Format::iq4_xs,
                              Format::mxfp4, Format::fp8_block, Format::int4_planar, Format::int8_planar})
    for (const int rows : {1, 4, 128})
      cases.push_back(linear_case({.segments = {{.format = format, .out = 2048, .in = 2048}}, .rows = rows}));
  cases.push_back(swiglu_case({.format = Format::q4_1, .out = 3072, .in = 576}, 1));
  cases.push_back(linear_case({.segments = {{.format = Format::q4_0, .out = 960, .in = 576}}, .rows = 512}));
  cases.push_back(ffn_case({.format = Format::q4_0, .out = 3072, .in = 576}, 512));
  add_attention(cases);
  for (const int rows : {1, 128})
    cases.push_back(moe_case({.label = "v2lite",
                              .gate_up = Format::q4_k,
                              .down = Format::q8_0,
                              .shared = Format::q4_k,
                              .n_experts = 64,
                              .top_k = 6,
                              .hidden = 2048,
                              .inner = 1408,
                              .shared_inner = 2816,
                              .rows = rows}));
  return cases;
}

OpFigure time_case(Ops& ops, const test::OpCase& c) {
  constexpr double kBeyondCaches = 192e6;  // bytes
  constexpr double kSeconds = 0.3;         // about this long for all runs of a case
  const int copies = static_cast<int>(std::clamp(kBeyondCaches / std::max(c.bytes, 1.0), 1.0, 64.0));
  std::vector<test::CaseInstance> instances;
  for (int i = 0; i < copies; ++i) instances.push_back(c.prepare(ops, ops.activation()));
  const Finish finish(ops);
  const double once = shortest_run(1, [&] {
    instances[0].call();
    finish();
  });
  const int runs = static_cast<int>(std::clamp(kSeconds / once / copies, 1.0, 10.0));
  const double seconds = shortest_run(runs, [&] {
    for (const test::CaseInstance& instance : instances) instance.call();
    finish();
  });
  return {c.name, seconds / copies, c.bytes, c.flops};
}

std::vector<test::OpCase> chosen_cases(std::vector<test::OpCase> cases, std::string_view filter) {
  std::erase_if(cases, [&](const test::OpCase& c) { return c.name.find(filter) == std::string::npos; });
  return cases;
}

void print_op_table(Ops& ops, const MachinePeaks& peaks, const std::vector<test::OpCase>& cases) {
  const auto share = [](double part, double whole) {
    return whole > 0.0 ? fmt::format("{:.0f}%", 100.0 * part / whole) : std::string("-");
  };
  write_out(fmt::format("{:<44} {:>10} {:>8} {:>6} {:>9} {:>6}\n", "", "us", "GB/s", "%peak", "TFLOP/s", "%peak"));
  for (const test::OpCase& c : cases) {
    const OpFigure f = time_case(ops, c);
    const double bytes = f.bytes / f.seconds, flops = f.flops / f.seconds;
    write_out(fmt::format("{:<44} {:>10.1f} {:>8.2f} {:>6} {:>9.4f} {:>6}\n", f.name, f.seconds * 1e6, bytes * 1e-9,
                          share(bytes, peaks.read), flops * 1e-12, share(flops, peaks.flops)));
  }
}

}  // namespace cachalot
