// Splitting kv_b into per-head k and v parts, and joining them again.
#include "model/mla_weights.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "base/error.h"

namespace cachalot {
namespace {

// f16 keeps three bits more than bf16 of what a quantized matrix says; bf16 is for the odd one that f16 cannot reach.
Format derived_format(Format stored, bool exact, std::span<const float> values) {
  if (stored == Format::f32 || stored == Format::f16 || stored == Format::bf16) return stored;
  if (exact) return Format::f32;
  const bool within_f16 = std::all_of(values.begin(), values.end(), [](float v) { return std::abs(v) < 60000.0f; });
  return within_f16 ? Format::f16 : Format::bf16;
}

// Rows of kv_b: for each head, nope rows of K, then v_dim rows of V.
void split(const MlaDims& d, bool exact, MlaSources& s) {
  const int per_head = d.nope + d.v_dim;
  const auto P = static_cast<size_t>(d.nope), V = static_cast<size_t>(d.v_dim), R = static_cast<size_t>(d.kv_rank),
             H = static_cast<size_t>(d.n_heads);
  std::vector<float> uk_t(H * R * P), row(R);
  for (int h = 0; h < d.n_heads; ++h) {
    float* k = uk_t.data() + static_cast<size_t>(h) * R * P;
    for (int p = 0; p < d.nope; ++p) {
      dequant_row_by_input(s.kv_b, 0, h * per_head + p, row.data());
      for (size_t r = 0; r < R; ++r) k[r * P + static_cast<size_t>(p)] = row[r];
    }
  }
  s.uk_t = make_linear_source(s.uk_t.name, derived_format(s.kv_b.format, exact, uk_t), uk_t, d.n_heads, d.kv_rank, d.nope);
  // V rows keep their bytes where a head's rows can be cut out of the stored matrix.
  if (s.kv_b.format != Format::fp8_block || (per_head % kFp8Block == 0 && d.nope % kFp8Block == 0)) {
    LinearSource first = slice_rows(s.kv_b, d.nope, d.v_dim);
    first.name = s.uv.name;
    s.uv = std::move(first);
    for (int h = 1; h < d.n_heads; ++h) s.uv.matrices.push_back(slice_rows(s.kv_b, h * per_head + d.nope, d.v_dim).matrices[0]);
  } else {
    std::vector<float> uv(H * V * R);
    for (int h = 0; h < d.n_heads; ++h)
      for (int v = 0; v < d.v_dim; ++v)
        dequant_row_by_input(s.kv_b, 0, h * per_head + d.nope + v, uv.data() + (static_cast<size_t>(h) * V + static_cast<size_t>(v)) * R);
    s.uv = make_linear_source(s.uv.name, derived_format(s.kv_b.format, exact, uv), uv, d.n_heads, d.v_dim, d.kv_rank);
  }
}

void join(const MlaDims& d, bool exact, MlaSources& s) {
  const auto P = static_cast<size_t>(d.nope), V = static_cast<size_t>(d.v_dim), R = static_cast<size_t>(d.kv_rank),
             H = static_cast<size_t>(d.n_heads);
  std::vector<float> kv_b(H * (P + V) * R), row(P);
  for (int h = 0; h < d.n_heads; ++h) {
    float* head = kv_b.data() + static_cast<size_t>(h) * (P + V) * R;
    for (int r = 0; r < d.kv_rank; ++r) {
      dequant_row_by_input(s.uk_t, h, r, row.data());
      for (size_t p = 0; p < P; ++p) head[p * R + static_cast<size_t>(r)] = row[p];
    }
    for (int v = 0; v < d.v_dim; ++v) dequant_row_by_input(s.uv, h, v, head + (P + static_cast<size_t>(v)) * R);
  }
  s.kv_b = make_linear_source(s.kv_b.name, derived_format(s.uk_t.format, exact, kv_b), kv_b, 1, static_cast<int>(H * (P + V)), d.kv_rank);
}

}  // namespace

MlaSources mla_sources(const Checkpoint& file, const std::string& prefix, const MlaDims& d, bool exact) {
  const std::string kv_b = prefix + "attn_kv_b.weight", k_b = prefix + "attn_k_b.weight", v_b = prefix + "attn_v_b.weight";
  MlaSources s{.kv_b = {.name = kv_b}, .uk_t = {.name = k_b}, .uv = {.name = v_b}};
  const bool has_kv_b = file.has(kv_b), has_parts = file.has(k_b) && file.has(v_b);
  if (!has_kv_b && !has_parts) fail("{}: neither {} nor {} with {} is there", file.name(), kv_b, k_b, v_b);
  if (has_kv_b) s.kv_b = file.linear(kv_b, 1, d.n_heads * (d.nope + d.v_dim), d.kv_rank);
  if (has_parts) {
    s.uk_t = file.linear(k_b, d.n_heads, d.kv_rank, d.nope);
    s.uv = file.linear(v_b, d.n_heads, d.v_dim, d.kv_rank);
  }
  if (!has_parts) split(d, exact, s);
  if (!has_kv_b) join(d, exact, s);
  return s;
}

}  // namespace cachalot
