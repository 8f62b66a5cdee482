// Cases of the linear maps: every format, odd shapes, bias, beta, mixed segments, strided rows; swiglu; per-head maps with a tail.
#include <algorithm>

#include "ops/case_support.h"

namespace cachalot::test {
namespace {

std::string describe(const WeightShape& w) {
  return fmt::format("{}{}{}", format_name(w.format), w.group != 0 ? fmt::format("_g{}", w.group) : "", w.permuted ? "_perm" : "");
}

std::string linear_name(const LinearCase& s) {
  std::string formats;
  int out = 0;
  bool bias = false;
  for (const WeightShape& w : s.segments) {
    formats = formats.empty() ? describe(w) : fmt::format("{}+{}", formats, describe(w));
    out += w.out;
    bias = bias || w.with_bias;
  }
  return fmt::format("linear/{}/{}x{}/T{}{}{}{}{}", formats, out, s.segments[0].in, s.rows, bias ? "/bias" : "",
                     s.beta != 0.0f ? fmt::format("/beta{}", s.beta) : "", s.f32_out ? "/f32" : "", s.strided ? "/strided" : "");
}

struct HeadShape {
  Format format;
  int heads, out, in, tail, rows;
  bool strided;
};
OpCase head_linear_case(const HeadShape& s) {
  OpCase c{.name = fmt::format("head_linear/{}/{}x{}x{}+{}/T{}{}", format_name(s.format), s.heads, s.out, s.in, s.tail, s.rows,
                               s.strided ? "/strided" : ""),
           .op = "head_linear",
           .quantised = !is_float(s.format)};
  const WeightShape shape{.format = s.format, .out = s.out, .in = s.in, .n_matrices = s.heads};
  c.bytes = weight_bytes(shape) + 4.0 * s.rows * s.heads * (s.in + s.out + 2 * s.tail);
  c.flops = 2.0 * s.rows * s.heads * s.in * s.out;
  c.prepare = [=, name = c.name](Ops& ops, DType rounding) {
    CaseBuilder b(ops, rounding, name);
    const Linear w = b.weights(shape);
    const auto x = b.activations(s.rows, s.heads * (s.in + s.tail), 1.0f, s.strided ? 48 : 0);
    const auto y = b.unset(ops.activation(), s.rows, s.heads * (s.out + s.tail));
    b.output("y", y);
    return b.finish([&ops, w, x, y] { ops.head_linear(x->view(), w, y->view()); });
  };
  return c;
}

// An input size that the format can hold, near `in`.
int fitting(Format format, int in) {
  const bool planar = format == Format::int4_planar || format == Format::int8_planar;
  return planar ? (in + 31) / 32 * 32 : rounded_to_blocks(format, in);
}

}  // namespace

OpCase linear_case(const LinearCase& s) {
  OpCase c{.name = linear_name(s), .op = "linear"};
  const int in = s.segments[0].in;
  int out = 0;
  for (const WeightShape& w : s.segments) {
    out += w.out;
    c.bytes += weight_bytes(w);
    c.quantised = c.quantised || !is_float(w.format);
  }
  c.bytes += 4.0 * s.rows * (in + out);
  c.flops = 2.0 * s.rows * in * out;
  c.prepare = [=, name = c.name](Ops& ops, DType rounding) {
    CaseBuilder b(ops, rounding, name);
    std::vector<LinearSource> sources;
    for (const WeightShape& w : s.segments) sources.push_back(b.source(w, fmt::format("segment{}", sources.size())));
    const Linear w = ops.pack(sources);
    const int gap = s.strided ? 24 : 0;
    const auto x = b.activations(s.rows, in, 1.0f, gap);
    const DType y_dtype = s.f32_out ? DType::f32 : ops.activation();
    const auto y = s.beta == 0.0f ? b.unset(y_dtype, s.rows, out, gap)
                                  : (s.f32_out ? b.f32(s.rows, out, 1.0f, gap) : b.activations(s.rows, out, 1.0f, gap));
    b.output("y", y);
    return b.finish([&ops, w, x, y, beta = s.beta] { ops.linear(x->view(), w, y->view(), beta); });
  };
  return c;
}

OpCase swiglu_case(const WeightShape& shape, int rows) {
  OpCase c{.name = fmt::format("linear_swiglu/{}/{}x{}/T{}", describe(shape), shape.out, shape.in, rows),
           .op = "linear_swiglu",
           .quantised = !is_float(shape.format)};
  c.bytes = weight_bytes(shape) + 4.0 * rows * (shape.in + shape.out / 2.0);
  c.flops = 2.0 * rows * shape.in * shape.out;
  c.prepare = [=, name = c.name](Ops& ops, DType rounding) {
    CaseBuilder b(ops, rounding, name);
    WeightShape half = shape;
    half.out /= 2;
    const LinearSource gate_up[2] = {b.source(half, "gate"), b.source(half, "up")};
    const Linear w = ops.pack(gate_up);
    const auto x = b.activations(rows, shape.in), h = b.unset(ops.activation(), rows, shape.out / 2);
    b.output("h", h);
    return b.finish([&ops, w, x, h] { ops.linear_swiglu(x->view(), w, h->view()); });
  };
  return c;
}

OpCase ffn_case(const WeightShape& gate_up, int rows) {
  const int hidden = gate_up.in, inner = gate_up.out / 2;
  OpCase c{.name = fmt::format("linear_swiglu/swiglu_ffn/{}/{}x{}/T{}", describe(gate_up), inner, hidden, rows),
           .op = "linear_swiglu",
           .quantised = !is_float(gate_up.format)};
  const WeightShape half{.format = gate_up.format, .out = inner, .in = hidden}, down{.format = gate_up.format, .out = hidden, .in = inner};
  c.bytes = weight_bytes(gate_up) + weight_bytes(down) + 8.0 * rows * hidden;
  c.flops = 6.0 * rows * hidden * inner;
  c.slack = 2.0;  // the errors of two products
  c.prepare = [=, name = c.name](Ops& ops, DType rounding) {
    CaseBuilder b(ops, rounding, name);
    const LinearSource sources[2] = {b.source(half, "gate"), b.source(half, "up")};
    const Linear up = ops.pack(sources), back = b.weights(down);
    const auto x = b.activations(rows, hidden), y = b.unset(ops.activation(), rows, hidden);
    b.output("y", y);
    return b.finish([&ops, up, back, x, y] { ops.swiglu_ffn(x->view(), up, back, y->view()); });
  };
  return c;
}

void add_linear_cases(std::vector<OpCase>& cases) {
  for (const Format f : all_formats()) {
    for (const int rows : {1, 2, 3, 7, 16, 33, 130})
      cases.push_back(linear_case({.segments = {{.format = f, .out = 96, .in = 512}}, .rows = rows}));
    for (const int rows : {1, 5, 18}) {
      cases.push_back(linear_case({.segments = {{.format = f, .out = 33, .in = fitting(f, 200)}}, .rows = rows}));
      cases.push_back(linear_case({.segments = {{.format = f, .out = 257, .in = fitting(f, 1410)}}, .rows = rows}));
      cases.push_back(linear_case({.segments = {{.format = f, .out = 1, .in = fitting(f, 96)}}, .rows = rows, .f32_out = true}));
      cases.push_back(
          linear_case({.segments = {{.format = f, .out = 40, .in = 256, .with_bias = true}}, .rows = rows, .beta = 1.0f, .strided = true}));
      cases.push_back(swiglu_case({.format = f, .out = 2 * 48, .in = 256}, rows));
      cases.push_back(swiglu_case({.format = f, .out = 2 * 31, .in = fitting(f, 544)}, rows));
    }
    for (const int rows : {1, 50}) cases.push_back(ffn_case({.format = f, .out = 2 * fitting(f, 96), .in = fitting(f, 160)}, rows));
    cases.push_back(linear_case({.segments = {{.format = f, .out = 64, .in = 256}}, .rows = 4, .beta = -0.5f, .f32_out = true}));
  }
  for (const Format f : {Format::f32, Format::f16, Format::bf16})
    for (const int in : {1, 7, 37, 131})
      cases.push_back(linear_case({.segments = {{.format = f, .out = 19, .in = in, .with_bias = true}}, .rows = 3}));
  for (const Format f : {Format::int4_planar, Format::int8_planar})
    for (const int rows : {1, 17})
      for (const bool permuted : {false, true}) {
        for (const int group : {32, 64, 128, 512})
          cases.push_back(
              linear_case({.segments = {{.format = f, .out = 72, .in = 512, .group = group, .permuted = permuted}}, .rows = rows}));
      }
  for (const int rows : {1, 4, 33}) {
    const auto q = [](Format f, int out, bool bias = false) { return WeightShape{.format = f, .out = out, .in = 512, .with_bias = bias}; };
    cases.push_back(linear_case({.segments = {q(Format::q4_k, 96), q(Format::q4_k, 33), q(Format::q6_k, 32)}, .rows = rows}));
    cases.push_back(linear_case({.segments = {q(Format::f32, 40, true), q(Format::bf16, 24), q(Format::q8_0, 17, true)}, .rows = rows}));
    cases.push_back(linear_case({.segments = {q(Format::fp8_block, 128), q(Format::fp8_block, 72)}, .rows = rows}));
    cases.push_back(linear_case({.segments = {q(Format::q5_0, 48, true), q(Format::f16, 8, true)}, .rows = rows, .beta = 1.0f}));
    for (const Format f : {Format::f32, Format::f16, Format::bf16, Format::q8_0, Format::fp8_block}) {
      cases.push_back(head_linear_case({f, 4, 64, 32, 16, rows, true}));
      cases.push_back(head_linear_case({f, 4, 32, 64, 0, rows, false}));
      cases.push_back(head_linear_case({f, 3, 512, 128, 64, rows, true}));
      cases.push_back(head_linear_case({f, 3, 128, 512, 0, rows, false}));
    }
  }
}

}  // namespace cachalot::test
