// What an importance matrix says about a model's tensors.
#include "quant/imatrix.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace cachalot {
namespace {

// The other name of the weights that read a layer's latent, or "".
std::string twin_of(const std::string& name) {
  const auto replaced = [&](std::string_view from, std::string_view to) {
    return name.ends_with(from) ? name.substr(0, name.size() - from.size()) + std::string(to) : std::string{};
  };
  const std::string v_b = replaced("attn_kv_b.weight", "attn_v_b.weight");
  return v_b.empty() ? replaced("attn_v_b.weight", "attn_kv_b.weight") : v_b;
}

enum class Fault : uint8_t { none, unseen, not_finite, negative, zero };

Fault fault_of(const float* sums, size_t n, int64_t count) {
  if (count <= 0) return Fault::unseen;
  bool any = false;
  for (size_t k = 0; k < n; ++k) {
    if (!std::isfinite(sums[k])) return Fault::not_finite;
    if (sums[k] < 0.0f) return Fault::negative;
    any = any || sums[k] > 0.0f;
  }
  return any ? Fault::none : Fault::zero;
}

const char* name_of(Fault fault) {
  switch (fault) {
    case Fault::unseen: return "saw no token";
    case Fault::not_finite: return "not finite";
    case Fault::negative: return "negative";
    case Fault::zero: return "zero all over";
    case Fault::none: break;
  }
  return "good";
}

// The numbers of matrix m of a stack of n, and how many tokens they are of.
struct Row {
  const float* sums = nullptr;
  size_t n = 0;
  int64_t count = 0;
};
Row row_of(const ImportanceMatrix::Entry& entry, int n_matrices, int m) {
  const auto i = static_cast<size_t>(m);
  const size_t n = entry.sums.size() / static_cast<size_t>(n_matrices);
  return {entry.sums.data() + i * n, n, entry.counts[entry.counts.size() == 1 ? 0 : i]};
}

std::vector<float> means(const Row& row) {
  if (fault_of(row.sums, row.n, row.count) != Fault::none) return {};
  std::vector<float> out(row.sums, row.sums + row.n);
  for (float& v : out) v /= static_cast<float>(row.count);
  return out;
}

// How many matrices of width `in` share this entry: those of the stack; heads that were stored apart, or joined.
int n_rows(const ImportanceMatrix::Entry& entry, int in) { return static_cast<int>(entry.sums.size()) / in; }

std::string list(const std::vector<int>& numbers) {
  constexpr size_t kShown = 12;
  std::string out;
  for (size_t i = 0; i < std::min(numbers.size(), kShown); ++i) out += (i > 0 ? ", " : "") + std::to_string(numbers[i]);
  if (numbers.size() > kShown) out += fmt::format(" and {} more", numbers.size() - kShown);
  return out;
}

}  // namespace

void ImportanceMatrix::add(const ImportanceMatrix& other) {
  const int64_t scale = other.chunk_size == 0 ? std::max(1, chunk_size) : 1;
  for (const auto& [name, more] : other.entries) {
    const auto [at, is_new] = entries.try_emplace(name, more);
    Entry& entry = at->second;
    if (is_new) {
      for (float& v : entry.sums) v *= static_cast<float>(scale);
      for (int64_t& c : entry.counts) c *= scale;
      continue;
    }
    if (entry.sums.size() != more.sums.size())
      fail("{}: {}: found {} sums, expected {} as in the other file", other.file, name, more.sums.size(), entry.sums.size());
    if (entry.counts.size() < more.counts.size()) entry.counts.assign(more.counts.size(), entry.counts.front());
    for (size_t i = 0; i < entry.sums.size(); ++i) entry.sums[i] += more.sums[i] * static_cast<float>(scale);
    for (size_t i = 0; i < entry.counts.size(); ++i) entry.counts[i] += more.counts[more.counts.size() == 1 ? 0 : i] * scale;
  }
  datasets.insert(datasets.end(), other.datasets.begin(), other.datasets.end());
  chunk_count = static_cast<int>(std::min<int64_t>(int64_t{chunk_count} + other.chunk_count, INT32_MAX));
}

std::vector<float> ImportanceMatrix::importance(const ModelMatrix& matrix, int m) const {
  if (const auto found = entries.find(matrix.name); found != entries.end()) return means(row_of(found->second, matrix.n_matrices, m));
  const auto twin = entries.find(twin_of(matrix.name));
  if (twin == entries.end()) return {};
  const int heads = n_rows(twin->second, matrix.in);
  if (heads == 1) return means(row_of(twin->second, 1, 0));  // kv_b's latent, the same for every head of v_b
  // v_b's inputs are sums of latents, head by head; for kv_b, which all heads share, their mean.
  std::vector<float> out(static_cast<size_t>(matrix.in));
  int used = 0;
  for (int h = 0; h < heads; ++h) {
    const std::vector<float> one = means(row_of(twin->second, heads, h));
    if (one.empty()) continue;
    for (size_t k = 0; k < out.size(); ++k) out[k] += one[k];
    ++used;
  }
  if (used == 0) return {};
  for (float& v : out) v /= static_cast<float>(used);
  return out;
}

ImatrixFit fit_of(const ImportanceMatrix& imatrix, const std::vector<PlannedMatrix>& plan) {
  ImatrixFit fit;
  std::map<std::string, bool> known;
  size_t used = 0;
  for (const PlannedMatrix& p : plan) {
    const ModelMatrix& matrix = p.matrix;
    const std::string twin = twin_of(matrix.name);
    known[matrix.name] = true;
    if (!twin.empty()) known[twin] = true;
    auto found = imatrix.entries.find(matrix.name);
    const bool own = found != imatrix.entries.end();
    if (!own && !twin.empty()) found = imatrix.entries.find(twin);
    if (found == imatrix.entries.end()) {
      if (matrix.name != "token_embd.weight" && !is_float(p.scheme.format)) fit.missing.push_back(matrix.name);
      continue;
    }
    const auto& [name, entry] = *found;
    const auto in = static_cast<size_t>(matrix.in), expected = in * static_cast<size_t>(matrix.n_matrices);
    if (own ? entry.sums.size() != expected : entry.sums.size() % in != 0)
      fail("{}: {}: found {} numbers, expected {} for {} x [{}, {}]", imatrix.file, name, entry.sums.size(), expected, matrix.n_matrices,
           matrix.out, matrix.in);
    if (entry.counts.size() != 1 && entry.counts.size() != static_cast<size_t>(matrix.n_matrices))
      fail("{}: {}: found {} counts, expected 1 or {}", imatrix.file, name, entry.counts.size(), matrix.n_matrices);
    ++used;
    std::map<Fault, std::vector<int>> faults;
    const int n = own ? matrix.n_matrices : n_rows(entry, matrix.in);
    for (int m = 0; m < n; ++m) {
      const Row row = row_of(entry, n, m);
      const Fault fault = fault_of(row.sums, row.n, row.count);
      if (fault != Fault::none) faults[fault].push_back(m);
    }
    for (const auto& [fault, which] : faults)
      fit.neutral.push_back(n == 1 ? fmt::format("{}: {}", name, name_of(fault))
                                   : fmt::format("{}: matrices {}: {}", name, list(which), name_of(fault)));
  }
  if (used == 0) fail("{}: none of its {} entries is of this model", imatrix.file, imatrix.entries.size());
  for (const auto& [name, entry] : imatrix.entries) {
    // Routers are never quantized, and k_b is derived where kv_b is stored.
    if (!known.contains(name) && !name.ends_with("ffn_gate_inp.weight") && !name.ends_with("attn_k_b.weight")) fit.unknown.push_back(name);
  }
  return fit;
}

}  // namespace cachalot
