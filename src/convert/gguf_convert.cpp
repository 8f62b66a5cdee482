// The list of tensors of each family, declared first, then written one after the other, row by row.
#include "convert/gguf_convert.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "convert/gguf_metadata.h"
#include "io/gguf.h"
#include "model/mla_weights.h"

namespace cachalot {
namespace {

// Row order of llama's q and k: a head's rows j * half + i (j = 0, 1) become 2 i + j, so that rotary halves become adjacent pairs.
std::vector<int> adjacent_pairs(int n_heads, int head_dim) {
  std::vector<int> rows;
  for (int h = 0; h < n_heads; ++h)
    for (int i = 0; i < head_dim / 2; ++i)
      for (const int j : {0, 1}) rows.push_back(h * head_dim + j * (head_dim / 2) + i);
  return rows;
}

}  // namespace

class GgufModelWriter::Impl {
 public:
  Impl(const Checkpoint& original, const std::filesystem::path& path, const ConvertOptions& options)
      : model_(&original),
        options_(options),
        c_(read_config(original)),
        out_(path, options.layers_done ? AtomicFile::Kind::in_place : AtomicFile::Kind::renamed) {
    for (const TensorInfo& tensor : original.tensors())
      total_ += static_cast<size_t>(std::accumulate(tensor.shape.begin(), tensor.shape.end(), int64_t{1}, std::multiplies<>()));
    std::string name = std::filesystem::path(original.name()).filename().string();
    if (name.empty()) name = std::filesystem::path(original.name()).parent_path().filename().string();
    if (const GgufFile* file = original.gguf()) {
      for (const auto& [key, value] : file->metadata())
        if (!key.starts_with("split.")) out_.set(key, value);
    } else {
      write_model_metadata(out_, c_, name, options_.format);
      write_tokenizer_metadata(out_, original, c_);
    }
    permutes_ = c_.family == Family::llama && original.gguf() == nullptr;
    if (options_.file_type >= 0) out_.set_u32("general.file_type", static_cast<uint32_t>(options_.file_type));
    for (const auto& [key, value] : options_.metadata) out_.set_string(key, value);
    // Two passes over one list: the table of a GGUF file comes before its data.
    globals();
    const int done = options_.layers_done.value_or(-1);
    size_t n_written = done == 0 ? out_.n_declared() : 0;
    for (int l = 0; l < c_.n_layers; ++l) {
      layer(l);
      if (l + 1 == done) n_written = out_.n_declared();
    }
    declaring_ = false;
    if (options_.layers_done) out_.begin(n_written);
  }

  void globals(const Checkpoint& model) {
    model_ = &model;
    globals();
  }
  void layer(int l, const Checkpoint& model) {
    model_ = &model;
    layer(l);
  }
  [[nodiscard]] int n_layers() const { return c_.n_layers; }
  void sync() { out_.sync(); }

  ConvertResult finish() {
    out_.commit();
    if (c_.n_mtp_layers > 0)
      result_.notes.push_back(
          fmt::format("{} multi-token-prediction layer(s) were left out: the GGUF architecture has no place for them", c_.n_mtp_layers));
    if (c_.mla && c_.rope.scaling == RopeConfig::Scaling::yarn && c_.rope.magnitude != 1.0)
      result_.notes.push_back(
          "mscale and mscale_all_dim differ, which the GGUF architecture cannot express: readers will take them as equal");
    return std::move(result_);
  }

 private:
  void globals() {
    matrix("token_embd.weight", c_.vocab, c_.hidden);
    vector("output_norm.weight", c_.hidden);
    if (!c_.tied_head) matrix("output.weight", c_.vocab, c_.hidden);
    if (c_.rope.scaling == RopeConfig::Scaling::llama3) rope_factors();
  }

  void layer(int l) {
    prefix_ = "blk." + std::to_string(l) + ".";
    vector(prefix_ + "attn_norm.weight", c_.hidden);
    vector(prefix_ + "ffn_norm.weight", c_.hidden);
    if (c_.mla)
      mla();
    else
      gqa();
    if (c_.is_moe_layer(l))
      moe();
    else
      ffn(1, c_.intermediate, "");
  }

  void gqa() {
    const int n_q = c_.n_heads * c_.head_dim, n_kv = c_.n_kv_heads * c_.head_dim;
    const auto projection = [&](const char* name, int out, int n_heads, bool rotated) {
      const std::vector<int> order = rotated && permutes_ ? adjacent_pairs(n_heads, c_.head_dim) : std::vector<int>{};
      matrix(prefix_ + name + ".weight", out, c_.hidden, 1, order);
      if (c_.qkv_bias) vector(prefix_ + name + ".bias", out, order);
    };
    projection("attn_q", n_q, c_.n_heads, true);
    projection("attn_k", n_kv, c_.n_kv_heads, true);
    projection("attn_v", n_kv, c_.n_kv_heads, false);
    if (c_.qk_norm) {
      vector(prefix_ + "attn_q_norm.weight", c_.head_dim);
      vector(prefix_ + "attn_k_norm.weight", c_.head_dim);
    }
    matrix(prefix_ + "attn_output.weight", c_.hidden, n_q);
  }

  void mla() {
    const int d_q = c_.n_heads * (c_.nope + c_.rope.dim);
    if (c_.q_rank > 0) {
      matrix(prefix_ + "attn_q_a.weight", c_.q_rank, c_.hidden);
      vector(prefix_ + "attn_q_a_norm.weight", c_.q_rank);
      matrix(prefix_ + "attn_q_b.weight", d_q, c_.q_rank);
    } else {
      matrix(prefix_ + "attn_q.weight", d_q, c_.hidden);
    }
    matrix(prefix_ + "attn_kv_a_mqa.weight", c_.kv_rank + c_.rope.dim, c_.hidden);
    vector(prefix_ + "attn_kv_a_norm.weight", c_.kv_rank);
    const std::string k_b = prefix_ + "attn_k_b.weight", v_b = prefix_ + "attn_v_b.weight";
    if (declaring_) {  // deriving them twice would double the work
      declare(k_b, format_for(k_b, c_.nope), {c_.n_heads, c_.kv_rank, c_.nope});
      declare(v_b, format_for(v_b, c_.kv_rank), {c_.n_heads, c_.v_dim, c_.kv_rank});
    } else {
      const MlaSources s = mla_sources(*model_, prefix_, c_.mla_dims(), /*exact=*/true);
      write_rows(s.uk_t, format_for(k_b, c_.nope));
      write_rows(s.uv, format_for(v_b, c_.kv_rank));
    }
    matrix(prefix_ + "attn_output.weight", c_.hidden, c_.n_heads * c_.v_dim);
  }

  void moe() {
    const LinearSource router = model_->linear(prefix_ + "ffn_gate_inp.weight", 1, c_.n_experts, c_.hidden);
    stored_as(prefix_ + "ffn_gate_inp.weight", router, {c_.n_experts, c_.hidden}, Format::f32);
    if (model_->has(prefix_ + "exp_probs_b.bias")) vector(prefix_ + "exp_probs_b.bias", c_.n_experts);
    ffn(c_.n_experts, c_.moe_intermediate, "_exps");
    if (c_.n_shared > 0) ffn(1, c_.n_shared * c_.moe_intermediate, "_shexp");
  }

  void ffn(int n_matrices, int inner, const std::string& suffix) {
    matrix(prefix_ + "ffn_gate" + suffix + ".weight", inner, c_.hidden, n_matrices);
    matrix(prefix_ + "ffn_up" + suffix + ".weight", inner, c_.hidden, n_matrices);
    matrix(prefix_ + "ffn_down" + suffix + ".weight", c_.hidden, inner, n_matrices);
  }

  void matrix(const std::string& name, int out, int in, int n_matrices = 1, const std::vector<int>& row_order = {}) {
    const bool stacked = name.find("_exps.") != std::string::npos;
    stored_as(name, model_->linear(name, n_matrices, out, in),
              stacked ? std::vector<int64_t>{n_matrices, out, in} : std::vector<int64_t>{out, in}, format_for(name, in), row_order);
  }

  // The format asked for, or f16 where its blocks do not divide rows of `in`.
  Format format_for(const std::string& name, int in) {
    if (options_.format_of) return options_.format_of(name);
    if (in % info(options_.format).block_elems == 0) return options_.format;
    if (declaring_)
      result_.notes.push_back(
          fmt::format("{}: rows of {} are no multiple of {}: stored as f16", name, in, info(options_.format).block_elems));
    return Format::f16;
  }

  void stored_as(const std::string& name, const LinearSource& source, const std::vector<int64_t>& shape, Format format,
                 const std::vector<int>& row_order = {}) {
    if (declaring_)
      declare(name, format, shape);
    else
      write_rows(source, format, row_order);
  }

  void write_rows(const LinearSource& source, Format format, const std::vector<int>& row_order = {}) {
    std::vector<float> values(static_cast<size_t>(source.in));
    std::vector<std::byte> bytes(row_bytes(format, source.in));
    for (int m = 0; m < source.n_matrices(); ++m)
      for (int r = 0; r < source.out; ++r) {
        const int row = row_order.empty() ? r : row_order[static_cast<size_t>(r)];
        if (source.format == format) {
          out_.write(source.matrices[static_cast<size_t>(m)].data.subspan(static_cast<size_t>(row) * bytes.size(), bytes.size()));
          continue;
        }
        dequant_row_by_input(source, m, row, values.data());
        quantize_row(format, values.data(), source.in, bytes.data());
        out_.write(bytes);
      }
    advance(static_cast<size_t>(source.n_matrices()) * static_cast<size_t>(source.out) * static_cast<size_t>(source.in));
  }

  void vector(const std::string& name, int n, const std::vector<int>& order = {}) {
    if (declaring_) {
      declare(name, Format::f32, {n});
      return;
    }
    std::vector<float> values = model_->vector(name, n);
    if (!order.empty()) {
      const std::vector<float> unordered = values;
      for (size_t i = 0; i < values.size(); ++i) values[i] = unordered[static_cast<size_t>(order[i])];
    }
    out_.write(std::as_bytes(std::span<const float>(values)));
    advance(values.size());
  }

  // Llama 3's frequency bands as divisors of the plain frequencies.
  void rope_factors() {
    const std::string name = "rope_freqs.weight";
    if (declaring_) {
      declare(name, Format::f32, {c_.rope.dim / 2});
      return;
    }
    RopeConfig plain = c_.rope;
    plain.scaling = RopeConfig::Scaling::none;
    const std::vector<double> from = rope_frequencies(plain), to = rope_frequencies(c_.rope);
    std::vector<float> factors(from.size());
    for (size_t i = 0; i < factors.size(); ++i) factors[i] = static_cast<float>(from[i] / to[i]);
    out_.write(std::as_bytes(std::span<const float>(factors)));
  }

  void declare(const std::string& name, Format format, const std::vector<int64_t>& shape) {
    out_.declare(name, format, shape);
    ++result_.n_tensors;
    const int64_t n_rows = std::accumulate(shape.begin(), shape.end() - 1, int64_t{1}, std::multiplies<>());
    result_.bytes += static_cast<size_t>(n_rows) * row_bytes(format, shape.back());
  }

  void advance(size_t n_values) {
    done_ += n_values;
    if (options_.progress) options_.progress(std::min(done_, total_), total_);
  }

  const Checkpoint* model_;
  ConvertOptions options_;
  Config c_;
  GgufWriter out_;
  ConvertResult result_;
  std::string prefix_;
  bool declaring_ = true, permutes_ = false;  // llama's q and k rows, which GGUF files hold permuted already
  size_t done_ = 0, total_ = 0;
};

GgufModelWriter::GgufModelWriter(const Checkpoint& original, const std::filesystem::path& out, const ConvertOptions& options)
    : impl_(std::make_unique<Impl>(original, out, options)) {}
GgufModelWriter::~GgufModelWriter() = default;
void GgufModelWriter::globals(const Checkpoint& model) { impl_->globals(model); }
void GgufModelWriter::layer(int layer, const Checkpoint& model) { impl_->layer(layer, model); }
int GgufModelWriter::n_layers() const { return impl_->n_layers(); }
void GgufModelWriter::sync() { impl_->sync(); }
ConvertResult GgufModelWriter::finish() { return impl_->finish(); }

ConvertResult convert_to_gguf(const Checkpoint& checkpoint, const std::filesystem::path& out, const ConvertOptions& options) {
  if (checkpoint.container() != Checkpoint::Container::safetensors)
    fail("{}: already a GGUF file; convert reads safetensors", checkpoint.name());
  GgufModelWriter writer(checkpoint, out, options);
  writer.globals(checkpoint);
  for (int l = 0; l < writer.n_layers(); ++l) writer.layer(l, checkpoint);
  return writer.finish();
}

}  // namespace cachalot
