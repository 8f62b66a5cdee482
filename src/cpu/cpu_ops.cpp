// CpuOps: memory, packing, and the operations on rows. Products are in linear.cpp, experts in moe.cpp, attention in attention.cpp.
#include "cpu/cpu_ops.h"

#include <algorithm>
#include <cstring>

#include "cpu/cpu_ops_impl.h"
#include "cpu/features.h"
#include "cpu/wide_pack.h"
#include "ops/kv_codec.h"

namespace cachalot {

std::unique_ptr<Ops> make_cpu_ops(const CpuOptions& options) { return std::make_unique<cpu::CpuOps>(options); }

namespace cpu {
namespace {

// Below this many numbers waking the other workers costs more than it saves.
constexpr int64_t kSmall = 32768;

std::shared_ptr<void> arena_memory(size_t bytes) { return map_huge(bytes); }

std::span<const int> ints(const View& v) {
  CACHALOT_CHECK(v.dtype == DType::i32 && (v.n_rows() == 1 || v.row_stride() == v.n_cols()), "an index array in {}", name_of(v.dtype));
  return {v.row<int>(0), static_cast<size_t>(v.n_rows()) * static_cast<size_t>(v.n_cols())};
}

void check_f32(const View& v) { CACHALOT_CHECK(v.dtype == DType::f32, "activations of {}, expected f32", name_of(v.dtype)); }

}  // namespace

CpuOps::CpuOps(const CpuOptions& options)
    : kernels_(select_kernels()),
      pool_(options.pool ? options.pool
                         : std::make_shared<ThreadPool>(
                               ThreadPoolOptions{.n_threads = options.n_threads, .pin = options.pin, .numa = options.numa})),
      arena_(arena_memory),
      rounds_activations_(!options.f32_products && kernels_.wide.quantise != nullptr),
      bf16_prompts_(options.bf16_prompts && !options.f32_products),
      scratch_(static_cast<size_t>(pool_->size())) {
  name_ = std::string("cpu-") + kernels_.name + (options.f32_products ? "-f32" : "");
}

const CpuPacked& packed_of(const Linear& w) {
  const auto* packed = dynamic_cast<const CpuPacked*>(w.packed.get());
  CACHALOT_CHECK(packed != nullptr, "a Linear that CpuOps did not pack");
  CACHALOT_CHECK(w.first >= 0 && w.first + w.n_matrices <= packed->n_matrices, "matrices {}+{} of {}", w.first, w.n_matrices,
                 packed->n_matrices);
  return *packed;
}

Linear CpuOps::pack(std::span<const LinearSource> row_segments) {
  auto packed = pack_weights(row_segments, weights_, *pool_, wide_kernels());
  return {.out = packed->out, .in = packed->in, .n_matrices = packed->n_matrices, .first = 0, .packed = packed};
}

Buffer CpuOps::alloc(size_t bytes) {
  constexpr size_t kOwnMapping = size_t{1} << 20;
  if (bytes >= kOwnMapping) return map_huge(bytes);
  constexpr std::align_val_t kAlign{256};
  void* memory = ::operator new(std::max<size_t>(bytes, 1), kAlign);
  std::memset(memory, 0, bytes);
  return {memory, [](void* p) { ::operator delete(p, kAlign); }};
}
void CpuOps::upload(void* device, const void* host, size_t bytes) {
  if (bytes != 0) std::memcpy(device, host, bytes);
}
void CpuOps::download(void* host, const void* device, size_t bytes) {
  if (bytes != 0) std::memcpy(host, device, bytes);
}
View CpuOps::temp(DType dtype, int rows, int cols) {
  CACHALOT_CHECK(rows >= 0 && cols >= 0, "{} x {}", rows, cols);
  return View::matrix(arena_.take(static_cast<size_t>(rows) * static_cast<size_t>(cols) * size_of(dtype)), dtype, rows, cols);
}

float* CpuOps::scratch(int worker, size_t n) {
  Scratch& s = scratch_[static_cast<size_t>(worker)];
  if (s.floats < n) {
    s.memory = map_huge(n * sizeof(float));
    s.floats = n;
  }
  return reinterpret_cast<float*>(s.memory.get());
}

const float* CpuOps::table_row(const CpuPacked& w, const Segment& s, int matrix, int row, int worker) {
  float* const values = scratch(worker, static_cast<size_t>(kGroupRows) * static_cast<size_t>(w.padded_in));
  if (s.wide) {
    const WideRows group = w.wide_rows(s, matrix, row / kWideRows * kWideRows, kWideRows);
    for (int u = 0; u < group.n_units; ++u)
      unpack_wide_row(s.codec, {group.unit_elems, group.unit_bytes, group.header_bytes},
                      group.data + static_cast<size_t>(u) * static_cast<size_t>(group.unit_bytes), row % kWideRows,
                      values + u * group.unit_elems);
    return values;
  }
  const int first = row / kGroupRows * kGroupRows;
  kernels_.decode[static_cast<int>(s.codec)](w.rows(s, matrix, first, kGroupRows), values, w.padded_in);
  return values + static_cast<int64_t>(row - first) * w.padded_in;
}

void CpuOps::embed(const Linear& table, View ids, View x) {
  const CpuPacked& w = packed_of(table);
  const auto tokens = ints(ids);
  check_f32(x);
  CACHALOT_CHECK(x.n_rows() == static_cast<int>(tokens.size()) && x.n_cols() == table.in && table.n_matrices == 1);
  const auto task = [&](int t, int worker) {
    const int id = tokens[static_cast<size_t>(t)];
    CACHALOT_CHECK(id >= -1 && id < table.out, "token {} of {}", id, table.out);
    float* const out = x.row<float>(t);
    if (id < 0) {
      std::fill_n(out, table.in, 0.0f);
      return;
    }
    const Segment* s = w.segments.data();
    while (id >= s->first_row + s->n_rows) ++s;
    const float* const from = table_row(w, *s, table.first, id - s->first_row, worker);
    if (s->perm.empty()) {
      std::copy_n(from, table.in, out);
    } else {
      for (int k = 0; k < table.in; ++k) out[s->perm[static_cast<size_t>(k)]] = from[k];
    }
  };
  parallel(x.n_rows(), static_cast<int64_t>(x.n_rows()) * table.in < kSmall, task);
}

void CpuOps::rmsnorm(View x, View w, float eps, View y) {
  check_f32(x);
  check_f32(y);
  const int n = w.n_rows() * w.n_cols(), parts = n > 0 ? x.n_cols() / n : 0;
  CACHALOT_CHECK(n > 0 && x.n_cols() == parts * n && (parts == 1 || x.n_dims == 3), "a norm of {} on rows of {}", n, x.n_cols());
  CACHALOT_CHECK(y.n_rows() == x.n_rows() && y.n_cols() == x.n_cols());
  const auto task = [&](int t, int) {
    for (int h = 0; h < parts; ++h)
      kernels_.rmsnorm(x.row<float>(t) + h * (parts == 1 ? 0 : x.stride[1]), w.row<float>(0), eps, n,
                       y.row<float>(t) + h * (parts == 1 ? 0 : y.stride[1]));
  };
  parallel(x.n_rows(), static_cast<int64_t>(x.n_rows()) * x.n_cols() < kSmall, task);
}

void CpuOps::add_rmsnorm(View residual, View delta, View w, float eps, View y) {
  const int n = residual.n_cols();
  check_f32(residual);
  check_f32(delta);
  check_f32(y);
  CACHALOT_CHECK(delta.n_cols() == n && delta.n_rows() == residual.n_rows() && w.n_rows() * w.n_cols() == n);
  CACHALOT_CHECK(y.n_cols() == n && y.n_rows() == residual.n_rows());
  const auto task = [&](int t, int) {
    kernels_.add_rmsnorm(residual.row<float>(t), delta.row<float>(t), w.row<float>(0), eps, n, y.row<float>(t));
  };
  parallel(residual.n_rows(), static_cast<int64_t>(residual.n_rows()) * n < kSmall, task);
}

void CpuOps::rope(View qk, View pos, const Rope& rope) {
  const auto positions = ints(pos);
  check_f32(qk);
  const int heads = qk.n_dims == 3 ? qk.shape[1] : 1, width = qk.n_dims == 3 ? qk.shape[2] : qk.shape[1];
  CACHALOT_CHECK(rope.dim % 2 == 0 && rope.dim <= width && rope.cos_sin.n_cols() == rope.dim, "rope of {} on heads of {}", rope.dim, width);
  CACHALOT_CHECK(qk.n_rows() == static_cast<int>(positions.size()));
  const auto task = [&](int t, int) {
    const int position = positions[static_cast<size_t>(t)];
    if (position < 0) return;
    CACHALOT_CHECK(position < rope.cos_sin.n_rows(), "position {} of {}", position, rope.cos_sin.n_rows());
    for (int h = 0; h < heads; ++h)
      kernels_.rope(qk.row<float>(t) + (heads == 1 ? 0 : h * qk.stride[1]) + (width - rope.dim), rope.cos_sin.row<float>(position),
                    rope.dim, rope.interleaved);
  };
  parallel(qk.n_rows(), static_cast<int64_t>(qk.n_rows()) * heads * rope.dim < kSmall, task);
}

void CpuOps::kv_write(const KvLayer& kv, const Batch& batch, View k, View v) {
  const auto slots = ints(batch.slots);
  const KvLayout& layout = kv.layout;
  const Element element = element_of(layout.format);
  check_f32(k);
  CACHALOT_CHECK(k.n_cols() == layout.heads * layout.k_dim && k.n_rows() <= static_cast<int>(slots.size()));
  CACHALOT_CHECK(layout.v_is_k_prefix == !v && (layout.v_is_k_prefix || v.n_cols() == layout.heads * layout.v_dim));
  const auto task = [&](int t, int) {
    if (slots[static_cast<size_t>(t)] < 0) return;
    const auto slot = static_cast<size_t>(slots[static_cast<size_t>(t)]);
    std::byte* const row = static_cast<std::byte*>(kv.k) + slot * layout.k_row_bytes();
    if (layout.format == KvFormat::fp8) {
      encode_kv_row(layout, {k.row<float>(t), static_cast<size_t>(k.n_cols())}, row);
      return;
    }
    kernels_.store_row(element, k.row<float>(t), k.n_cols(), row);
    if (!layout.v_is_k_prefix)
      kernels_.store_row(element, v.row<float>(t), v.n_cols(), static_cast<std::byte*>(kv.v) + slot * layout.v_row_bytes());
  };
  parallel(k.n_rows(), static_cast<int64_t>(k.n_rows()) * k.n_cols() < kSmall, task);
}

void CpuOps::gather_rows(View x, View ids, View y) {
  const auto rows = ints(ids);
  CACHALOT_CHECK(y.n_cols() == x.n_cols() && y.dtype == x.dtype && y.n_rows() == static_cast<int>(rows.size()));
  const size_t bytes = x.row_bytes(), step = static_cast<size_t>(x.row_stride()) * size_of(x.dtype);
  const size_t to_step = static_cast<size_t>(y.row_stride()) * size_of(y.dtype);
  for (int i = 0; i < y.n_rows(); ++i) {
    const int from = rows[static_cast<size_t>(i)];
    CACHALOT_CHECK(from >= -1 && from < x.n_rows(), "row {} of {}", from, x.n_rows());
    std::byte* const to = static_cast<std::byte*>(y.data) + static_cast<size_t>(i) * to_step;
    if (from < 0) {
      std::memset(to, 0, bytes);
    } else {
      std::memcpy(to, static_cast<const std::byte*>(x.data) + static_cast<size_t>(from) * step, bytes);
    }
  }
}

void CpuOps::scatter_add_rows(View x, View ids, View weights, View y) {
  const auto rows = ints(ids);
  check_f32(x);
  check_f32(y);
  CACHALOT_CHECK(x.n_rows() == static_cast<int>(rows.size()) && weights.n_rows() * weights.n_cols() == x.n_rows() &&
                 x.n_cols() == y.n_cols());
  for (int i = 0; i < x.n_rows(); ++i) {
    const int to = rows[static_cast<size_t>(i)];
    CACHALOT_CHECK(to >= -1 && to < y.n_rows(), "row {} of {}", to, y.n_rows());
    if (to >= 0) kernels_.axpy(weights.row<float>(0)[i], x.row<float>(i), x.n_cols(), y.row<float>(to));
  }
}

}  // namespace cpu
}  // namespace cachalot
