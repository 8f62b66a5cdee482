// RefOps: memory, packing, and the operations on rows. Attention is in ref_attention.cpp, experts in ref_moe.cpp.
#include "ops/ref_ops.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <new>

#include "base/error.h"
#include "ops/ref_detail.h"

namespace cachalot {
namespace {
using namespace ref;

constexpr std::align_val_t kAlign{256};

Buffer zeroed(size_t bytes) {
  void* memory = ::operator new(bytes == 0 ? 1 : bytes, kAlign);
  std::memset(memory, 0, bytes);
  return {memory, [](void* p) { ::operator delete(p, kAlign); }};
}

void check_segment(const LinearSource& first, const LinearSource& s) {
  validate(s);
  if (s.in != first.in) fail("{}: found an input of {}, expected {} as in {}", s.name, s.in, first.in, first.name);
  if (s.n_matrices() != first.n_matrices())
    fail("{}: found {} matrices, expected {} as in {}", s.name, s.n_matrices(), first.n_matrices(), first.name);
}

// y = x / rms(x) * w, sums in double.
void norm_row(const float* x, std::span<const float> w, float eps, float* y) {
  const int n = static_cast<int>(w.size());
  const double scale = 1.0 / std::sqrt(dot(x, x, n) / n + static_cast<double>(eps));
  for (int i = 0; i < n; ++i) y[i] = static_cast<float>(static_cast<double>(x[i]) * scale * static_cast<double>(w[static_cast<size_t>(i)]));
}

}  // namespace

RefOps::RefOps() : arena_(zeroed) {}
std::unique_ptr<Ops> make_ref_ops() { return std::make_unique<RefOps>(); }

Linear RefOps::pack(std::span<const LinearSource> row_segments) {
  CACHALOT_CHECK(!row_segments.empty());
  const LinearSource& first = row_segments[0];
  auto packed = std::make_shared<RefPacked>();
  packed->in = first.in;
  packed->n_matrices = first.n_matrices();
  bool has_bias = false;
  for (const LinearSource& s : row_segments) {
    check_segment(first, s);
    if (s.out > std::numeric_limits<int>::max() - packed->out) fail("{}: found more rows than an int counts", s.name);
    packed->out += s.out;
    has_bias = has_bias || !s.bias.empty();
  }
  const auto in = static_cast<size_t>(packed->in);
  packed->weights.resize(static_cast<size_t>(packed->n_matrices) * static_cast<size_t>(packed->out) * in);
  if (has_bias) packed->bias.resize(static_cast<size_t>(packed->out));
  std::vector<float> stored(in);
  float* row = packed->weights.data();
  for (int m = 0; m < packed->n_matrices; ++m) {
    for (const LinearSource& s : row_segments) {
      for (int r = 0; r < s.out; ++r, row += in) {
        dequant_row(s, m, r, s.perm.empty() ? row : stored.data());
        for (size_t k = 0; k < s.perm.size(); ++k) row[s.perm[k]] = stored[k];
      }
    }
  }
  size_t begin = 0;
  for (const LinearSource& s : row_segments) {
    std::copy(s.bias.begin(), s.bias.end(), packed->bias.begin() + static_cast<std::ptrdiff_t>(has_bias ? begin : 0));
    begin += static_cast<size_t>(s.out);
  }
  return {packed->out, packed->in, packed->n_matrices, 0, packed};
}

Buffer RefOps::alloc(size_t bytes) { return zeroed(bytes); }
void RefOps::upload(void* device, const void* host, size_t bytes) {
  if (bytes != 0) std::memcpy(device, host, bytes);
}
void RefOps::download(void* host, const void* device, size_t bytes) {
  if (bytes != 0) std::memcpy(host, device, bytes);
}
View RefOps::temp(DType dtype, int rows, int cols) {
  CACHALOT_CHECK(rows >= 0 && cols >= 0, "{} x {}", rows, cols);
  return View::matrix(arena_.take(static_cast<size_t>(rows) * static_cast<size_t>(cols) * size_of(dtype)), dtype, rows, cols);
}

void RefOps::embed(const Linear& table, View ids, View x) {
  const RefPacked& w = packed_of(table);
  const auto tokens = ints(ids);
  CACHALOT_CHECK(x.n_rows() == static_cast<int>(tokens.size()) && x.n_cols() == table.in && table.n_matrices == 1);
  for (int t = 0; t < x.n_rows(); ++t) {
    const int id = tokens[static_cast<size_t>(t)];
    CACHALOT_CHECK(id >= -1 && id < table.out, "token {} of {}", id, table.out);
    if (id < 0)
      std::fill_n(row_of(x, t), table.in, 0.0f);
    else
      std::copy_n(w.row(table.first, id), table.in, row_of(x, t));
  }
}

void RefOps::rmsnorm(View x, View w, float eps, View y) {
  const auto weight = floats(w);
  const int n = static_cast<int>(weight.size()), parts = x.n_cols() / n;
  CACHALOT_CHECK(n > 0 && x.n_cols() == parts * n && (parts == 1 || x.n_dims == 3), "a norm of {} on rows of {}", n, x.n_cols());
  CACHALOT_CHECK(y.n_rows() == x.n_rows() && y.n_cols() == x.n_cols());
  for (int t = 0; t < x.n_rows(); ++t)
    for (int h = 0; h < parts; ++h)
      norm_row(x.row<float>(t) + h * (parts == 1 ? 0 : x.stride[1]), weight, eps, y.row<float>(t) + h * (parts == 1 ? 0 : y.stride[1]));
}

void RefOps::add_rmsnorm(View residual, View delta, View w, float eps, View y) {
  const int n = residual.n_cols();
  CACHALOT_CHECK(delta.n_cols() == n && delta.n_rows() == residual.n_rows());
  for (int t = 0; t < residual.n_rows(); ++t) {
    float *to = row_of(residual, t), *from = row_of(delta, t);
    for (int i = 0; i < n; ++i) to[i] += from[i];
  }
  rmsnorm(residual, w, eps, y);
}

void RefOps::linear(View x, const Linear& w, View y, float beta) {
  const RefPacked& p = packed_of(w);
  CACHALOT_CHECK(w.n_matrices == 1 && x.n_cols() == w.in && y.n_cols() == w.out && x.n_rows() == y.n_rows(),
                 "[{}, {}] x [{}, {}] -> [{}, {}]", x.n_rows(), x.n_cols(), w.out, w.in, y.n_rows(), y.n_cols());
  for (int t = 0; t < x.n_rows(); ++t) {
    const float* in = row_of(x, t);
    float* out = row_of(y, t);
    for (int r = 0; r < w.out; ++r) {
      double sum = dot(p.row(w.first, r), in, w.in);
      if (!p.bias.empty()) sum += static_cast<double>(p.bias[static_cast<size_t>(r)]);
      if (beta != 0.0f) sum += static_cast<double>(beta) * static_cast<double>(out[r]);  // with beta 0, y need not hold numbers
      out[r] = static_cast<float>(sum);
    }
  }
}

void ref::swiglu_row(const RefPacked& w, int m, const float* x, float* h) {
  const int half = w.out / 2;
  const auto bias = [&](int r) { return w.bias.empty() ? 0.0 : static_cast<double>(w.bias[static_cast<size_t>(r)]); };
  for (int r = 0; r < half; ++r) {
    const double gate = dot(w.row(m, r), x, w.in) + bias(r), up = dot(w.row(m, half + r), x, w.in) + bias(half + r);
    h[r] = static_cast<float>(gate / (1.0 + std::exp(-gate)) * up);
  }
}

void RefOps::linear_swiglu(View x, const Linear& gate_up, View h) {
  const RefPacked& w = packed_of(gate_up);
  CACHALOT_CHECK(gate_up.n_matrices == 1 && gate_up.out % 2 == 0 && x.n_cols() == gate_up.in && h.n_cols() == gate_up.out / 2);
  CACHALOT_CHECK(x.n_rows() == h.n_rows());
  for (int t = 0; t < x.n_rows(); ++t) swiglu_row(w, gate_up.first, row_of(x, t), row_of(h, t));
}

void RefOps::head_linear(View x, const Linear& w, View y) {
  const RefPacked& p = packed_of(w);
  const int heads = w.n_matrices, width = x.n_cols() / heads, tail = width - w.in;
  CACHALOT_CHECK(tail >= 0 && x.n_cols() == heads * width && y.n_cols() == heads * (w.out + tail) && x.n_rows() == y.n_rows(),
                 "{} heads of {} -> {} from rows of {} to rows of {}", heads, w.in, w.out, x.n_cols(), y.n_cols());
  for (int t = 0; t < x.n_rows(); ++t) {
    const float* in = row_of(x, t);
    float* out = row_of(y, t);
    for (int h = 0; h < heads; ++h, in += width, out += w.out + tail) {
      for (int r = 0; r < w.out; ++r) out[r] = static_cast<float>(dot(p.row(w.first + h, r), in, w.in));
      std::copy_n(in + w.in, tail, out + w.out);
    }
  }
}

void RefOps::gather_rows(View x, View ids, View y) {
  const auto rows = ints(ids);
  const int n = x.n_cols();
  CACHALOT_CHECK(y.n_cols() == n && y.n_rows() == static_cast<int>(rows.size()));
  for (int i = 0; i < y.n_rows(); ++i) {
    const int from = rows[static_cast<size_t>(i)];
    CACHALOT_CHECK(from >= -1 && from < x.n_rows(), "row {} of {}", from, x.n_rows());
    if (from < 0)
      std::fill_n(row_of(y, i), n, 0.0f);
    else
      std::copy_n(row_of(x, from), n, row_of(y, i));
  }
}

}  // namespace cachalot
