// Cases of the operations on rows: embed, norms, rope, gather_rows, scatter_add_rows.
#include <cmath>

#include "ops/case_support.h"

namespace cachalot::test {
namespace {

constexpr float kEps = 1e-6f;

OpCase embed_case(Format format, int hidden, int rows) {
  OpCase c{.name = fmt::format("embed/{}/{}x{}/T{}", format_name(format), 67, hidden, rows), .op = "embed"};
  const WeightShape shape{.format = format, .out = 67, .in = hidden};
  c.bytes = rows * (static_cast<double>(row_bytes(format, hidden)) + 4.0 * hidden);
  c.prepare = [=, name = c.name](Ops& ops, DType rounding) {
    CaseBuilder b(ops, rounding, name);
    const Linear table = b.weights(shape);
    std::vector<int> ids;
    for (int t = 0; t < rows; ++t) ids.push_back(t % 5 == 3 ? -1 : b.uniform(0, shape.out - 1));
    const auto x = b.unset(DType::f32, rows, hidden);
    const auto tokens = b.ints(1, rows, ids);
    b.output("x", x);
    return b.finish([&ops, table, tokens, x] { ops.embed(table, tokens->view(), x->view()); });
  };
  return c;
}

struct NormShape {
  int rows, heads, dim;
  bool in_place, strided;
};
OpCase rmsnorm_case(const NormShape& s, bool f32_in) {
  OpCase c{.name = fmt::format("rmsnorm/{}{}{}x{}/T{}{}", s.in_place ? "in_place/" : "", f32_in ? "f32/" : "", s.heads, s.dim, s.rows,
                               s.strided ? "/strided" : ""),
           .op = "rmsnorm"};
  const int cols = s.heads * s.dim;
  c.bytes = 2.0 * s.rows * cols * 4.0;
  c.flops = 4.0 * s.rows * cols;
  c.prepare = [=, name = c.name](Ops& ops, DType rounding) {
    CaseBuilder b(ops, rounding, name);
    const int gap = s.strided ? 16 : 0;
    const auto x = f32_in ? b.f32(s.rows, cols, 3.0f, gap) : b.activations(s.rows, cols, 3.0f, gap);
    const auto y = s.in_place ? x : b.unset(ops.activation(), s.rows, cols, gap);
    const auto w = b.f32(1, s.dim);
    b.output("y", y);
    return b.finish([&ops, s, x, y, w] {
      const auto view = [&](const CaseTensor& t) { return s.heads == 1 ? t.view() : t.view().heads(s.heads, s.dim); };
      ops.rmsnorm(view(*x), w->view(), kEps, view(*y));
    });
  };
  return c;
}

OpCase add_rmsnorm_case(int rows, int dim) {
  OpCase c{.name = fmt::format("add_rmsnorm/{}/T{}", dim, rows), .op = "add_rmsnorm"};
  c.bytes = rows * dim * 16.0;
  c.flops = 5.0 * rows * dim;
  c.prepare = [=, name = c.name](Ops& ops, DType rounding) {
    CaseBuilder b(ops, rounding, name);
    const auto residual = b.f32(rows, dim, 5.0f), delta = b.activations(rows, dim), w = b.f32(1, dim),
               y = b.unset(ops.activation(), rows, dim);
    b.output("residual", residual);
    b.output("y", y);
    return b.finish([&ops, residual, delta, w, y] { ops.add_rmsnorm(residual->view(), delta->view(), w->view(), kEps, y->view()); });
  };
  return c;
}

struct RopeShape {
  int rows, heads, width, dim;  // heads 0: a matrix of one head per row
  bool interleaved, strided;
};
OpCase rope_case(const RopeShape& s) {
  OpCase c{.name = fmt::format("rope/{}/{}x{}of{}/T{}{}", s.interleaved ? "neighbours" : "halves", s.heads, s.dim, s.width, s.rows,
                               s.strided ? "/strided" : ""),
           .op = "rope"};
  const int heads = std::max(1, s.heads), n_positions = 300;
  c.bytes = 2.0 * s.rows * heads * s.dim * 4.0;
  c.flops = 3.0 * s.rows * heads * s.dim;
  c.prepare = [=, name = c.name](Ops& ops, DType rounding) {
    CaseBuilder b(ops, rounding, name);
    const auto x = b.activations(s.rows, heads * s.width, 1.0f, s.strided ? 8 : 0);
    std::vector<float> table;
    for (int p = 0; p < n_positions; ++p) {
      for (int i = 0; i < s.dim; ++i) {
        const double angle = p * std::pow(10000.0, -2.0 * (i % (s.dim / 2)) / s.dim);
        table.push_back(static_cast<float>(1.1 * (i < s.dim / 2 ? std::cos(angle) : std::sin(angle))));
      }
    }
    std::vector<int> positions;
    for (int t = 0; t < s.rows; ++t) positions.push_back(t == s.rows / 2 && s.rows > 2 ? -1 : b.uniform(0, n_positions - 1));
    const auto cos_sin = b.f32(n_positions, s.dim, table);
    const auto pos = b.ints(1, s.rows, positions);
    b.output("qk", x);
    return b.finish([&ops, s, x, pos, cos_sin] {
      const Rope rope{.dim = s.dim, .interleaved = s.interleaved, .cos_sin = cos_sin->view()};
      ops.rope(s.heads == 0 ? x->view() : x->view().heads(s.heads, s.width), pos->view(), rope);
    });
  };
  return c;
}

OpCase gather_case(int from, int rows, int cols) {
  OpCase c{.name = fmt::format("gather_rows/{}of{}x{}", rows, from, cols), .op = "gather_rows"};
  c.bytes = 2.0 * rows * cols * 4.0;
  c.prepare = [=, name = c.name](Ops& ops, DType rounding) {
    CaseBuilder b(ops, rounding, name);
    const auto x = b.activations(from, cols), y = b.unset(ops.activation(), rows, cols);
    std::vector<int> ids;
    for (int i = 0; i < rows; ++i) ids.push_back(i % 4 == 2 ? -1 : b.uniform(0, from - 1));
    const auto rows_wanted = b.ints(1, rows, ids);
    b.output("y", y, true);
    return b.finish([&ops, x, y, rows_wanted] { ops.gather_rows(x->view(), rows_wanted->view(), y->view()); });
  };
  return c;
}

OpCase scatter_case(int to, int rows, int cols) {
  OpCase c{.name = fmt::format("scatter_add_rows/{}to{}x{}", rows, to, cols), .op = "scatter_add_rows"};
  c.bytes = 3.0 * rows * cols * 4.0;
  c.prepare = [=, name = c.name](Ops& ops, DType rounding) {
    CaseBuilder b(ops, rounding, name);
    const auto x = b.activations(rows, cols), y = b.f32(to, cols), weights = b.f32(1, rows);
    std::vector<int> ids;
    for (int i = 0; i < rows; ++i) ids.push_back(i % 4 == 2 ? -1 : (i * 7) % to);
    const auto targets = b.ints(1, rows, ids);
    b.output("y", y);
    return b.finish([&ops, x, y, weights, targets] { ops.scatter_add_rows(x->view(), targets->view(), weights->view(), y->view()); });
  };
  return c;
}

}  // namespace

void add_row_cases(std::vector<OpCase>& cases) {
  for (const Format format : all_formats())
    for (const int hidden : {256, 512}) cases.push_back(embed_case(format, hidden, 9));
  cases.push_back(embed_case(Format::bf16, 37, 1));
  for (const int dim : {7, 64, 576, 2048, 7168})
    for (const int rows : {1, 33}) {
      cases.push_back(rmsnorm_case({rows, 1, dim, false, false}, false));
      cases.push_back(rmsnorm_case({rows, 1, dim, false, false}, true));
      cases.push_back(rmsnorm_case({rows, 1, dim, true, true}, false));
      cases.push_back(add_rmsnorm_case(rows, dim));
    }
  for (const int rows : {1, 5}) {
    cases.push_back(rmsnorm_case({rows, 4, 32, true, false}, false));
    cases.push_back(rmsnorm_case({rows, 3, 128, true, true}, false));
    cases.push_back(rmsnorm_case({rows, 2, 24, false, false}, false));
  }
  for (const bool interleaved : {false, true})
    for (const int rows : {1, 2, 33}) {
      cases.push_back(rope_case({rows, 4, 64, 64, interleaved, false}));
      cases.push_back(rope_case({rows, 3, 192, 64, interleaved, true}));
      cases.push_back(rope_case({rows, 5, 18, 6, interleaved, false}));
      cases.push_back(rope_case({rows, 0, 576, 64, interleaved, true}));
    }
  for (const int rows : {1, 7, 40}) {
    cases.push_back(gather_case(13, rows, 64));
    cases.push_back(gather_case(130, rows, 2047));
    cases.push_back(scatter_case(41, rows, 96));
  }
}

}  // namespace cachalot::test
