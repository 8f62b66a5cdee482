// The view: rows put back, halves of kv_b joined when they are asked for.
#include "convert/hf_view.h"

#include <cmath>
#include <cstring>

#include "model/mla_weights.h"

namespace cachalot {
namespace {

class HfView final : public Checkpoint {
 public:
  HfView(const Checkpoint& gguf, const Config& config, bool whole_kv_b)
      : base_(gguf), c_(config), permuted_(config.family == Family::llama), whole_kv_b_(whole_kv_b) {}

  [[nodiscard]] Container container() const override { return base_.container(); }
  [[nodiscard]] std::string name() const override { return base_.name(); }
  [[nodiscard]] const std::vector<TensorInfo>& tensors() const override { return base_.tensors(); }
  [[nodiscard]] std::vector<std::string> unmapped() const override { return base_.unmapped(); }
  [[nodiscard]] const GgufFile* gguf() const override { return base_.gguf(); }
  void forget(const LinearSource& source) const override { base_.forget(source); }

  [[nodiscard]] bool has(std::string_view canonical) const override {
    if (base_.has(canonical)) return true;
    const std::string prefix = prefix_of_kv_b(canonical);
    return !prefix.empty() && base_.has(prefix + "attn_k_b.weight") && base_.has(prefix + "attn_v_b.weight");
  }

  [[nodiscard]] LinearSource linear(std::string_view canonical, int n_matrices, int out, int in) const override {
    if (const std::string prefix = prefix_of_kv_b(canonical); !prefix.empty() && !base_.has(canonical))
      return mla_sources(base_, prefix, c_.mla_dims(), /*exact=*/true).kv_b;
    LinearSource source = base_.linear(canonical, n_matrices, out, in);
    if (!is_permuted(canonical)) return source;
    const size_t row = row_bytes(source.format, in);
    const auto memory = std::make_shared<std::vector<std::byte>>(static_cast<size_t>(out) * row);
    for (int r = 0; r < out; ++r)
      std::memcpy(memory->data() + static_cast<size_t>(r) * row, source.matrices[0].data.data() + static_cast<size_t>(stored_row(r)) * row,
                  row);
    source.matrices[0].data = *memory;
    source.keep_alive = {memory};
    return source;
  }

  [[nodiscard]] std::vector<float> vector(std::string_view canonical, int n) const override {
    std::vector<float> values = base_.vector(canonical, n);
    if (!is_permuted(canonical)) return values;
    const std::vector<float> stored = values;
    for (int r = 0; r < n; ++r) values[static_cast<size_t>(r)] = stored[static_cast<size_t>(stored_row(r))];
    return values;
  }

 private:
  [[nodiscard]] std::string prefix_of_kv_b(std::string_view canonical) const {
    constexpr std::string_view kName = "attn_kv_b.weight";
    return whole_kv_b_ && canonical.ends_with(kName) ? std::string(canonical.substr(0, canonical.size() - kName.size())) : std::string();
  }
  [[nodiscard]] bool is_permuted(std::string_view canonical) const {
    return permuted_ && (canonical.find(".attn_q.") != std::string_view::npos || canonical.find(".attn_k.") != std::string_view::npos);
  }
  // Row j * half + i of a head (j = 0, 1) lies at 2 i + j.
  [[nodiscard]] int stored_row(int row) const {
    const int half = c_.head_dim / 2, head = row / c_.head_dim, in_head = row % c_.head_dim;
    return head * c_.head_dim + 2 * (in_head % half) + in_head / half;
  }

  const Checkpoint& base_;
  Config c_;
  bool permuted_, whole_kv_b_;
};

bool gives(const RopeConfig& rope, const std::vector<double>& plain, const std::vector<float>& factors) {
  const std::vector<double> banded = rope_frequencies(rope);
  for (size_t i = 0; i < plain.size(); ++i) {
    const auto factor = static_cast<double>(factors[i]);
    if (!(std::abs(plain[i] / banded[i] - factor) <= 1e-4 * factor)) return false;
  }
  return true;
}

// Llama 3's parameters, if they give these divisors: bands from 1 to 4 turns in the original context, a power of two, and the largest
// divisor as the factor.
void name_frequency_factors(RopeConfig& rope) {
  if (rope.freq_factors.empty()) return;
  RopeConfig guess = rope;
  guess.freq_factors.clear();
  guess.scaling = RopeConfig::Scaling::none;
  const std::vector<double> plain = rope_frequencies(guess);
  guess.scaling = RopeConfig::Scaling::llama3;
  guess.factor = static_cast<double>(rope.freq_factors.back());
  guess.low_freq_factor = 1.0;
  guess.high_freq_factor = 4.0;
  for (int power = 4; power <= 24; ++power) {
    guess.original_positions = 1 << power;
    if (!gives(guess, plain, rope.freq_factors)) continue;
    rope = guess;
    return;
  }
}

}  // namespace

std::unique_ptr<Checkpoint> make_hf_view(const Checkpoint& gguf, Config& config, bool whole_kv_b) {
  if (config.family == Family::llama) config.rope.interleaved = false;
  name_frequency_factors(config.rope);
  return std::make_unique<HfView>(gguf, config, whole_kv_b);
}

}  // namespace cachalot
