// Which tensors each matrix becomes, their bytes, and the comparison with what the files then hold.
#include "quant/hf_sink.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/error.h"
#include "convert/hf_config.h"
#include "io/name_map.h"
#include "tensor/pack_words.h"

namespace cachalot {
namespace {

const char* dtype_of(Format format) {
  switch (format) {
    case Format::f32: return "F32";
    case Format::f16: return "F16";
    case Format::bf16: return "BF16";
    default: break;
  }
  CACHALOT_CHECK(false, "{} is no plain float", info(format).name);
}

std::string module_of(const std::string& hf_name) { return hf_name.substr(0, hf_name.size() - std::string_view(".weight").size()); }

std::vector<std::byte> bytes_of_i64(std::initializer_list<int64_t> values) {
  std::vector<std::byte> out(values.size() * sizeof(int64_t));
  std::memcpy(out.data(), values.begin(), out.size());
  return out;
}

bool same(std::span<const std::byte> a, std::span<const std::byte> b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

// The row as plain floats of this type.
std::vector<std::byte> row_as(Format format, const LinearSource& source, int matrix, int row) {
  std::vector<float> values(static_cast<size_t>(source.in));
  dequant_row_by_input(source, matrix, row, values.data());
  std::vector<std::byte> out(row_bytes(format, source.in));
  quantize_row(format, values.data(), source.in, out.data());
  return out;
}

// Does a file hold the weights that were meant, bit for bit? What is kept as plain floats may be rounded to their type.
bool same_weights(const LinearSource& meant, const LinearSource& found) {
  const bool rounded = is_float(found.format) && found.format != meant.format;
  if (!rounded && (found.format != meant.format || found.group != meant.group || !found.perm.empty())) return false;
  for (int m = 0; m < meant.n_matrices(); ++m) {
    const WeightBytes &x = meant.matrices[static_cast<size_t>(m)], &y = found.matrices[static_cast<size_t>(m)];
    if (!rounded && (!same(x.data, y.data) || !same(x.scales, y.scales) || !same(x.zeros, y.zeros))) return false;
    if (!rounded) continue;
    const size_t bytes = row_bytes(found.format, found.in);
    for (int r = 0; r < meant.out; ++r)
      if (!same(row_as(found.format, meant, m, r), y.data.subspan(static_cast<size_t>(r) * bytes, bytes))) return false;
  }
  return true;
}

}  // namespace

HfSink::HfSink(const Checkpoint& original, PartialRun& run, HfSinkOptions options)
    : original_(original), run_(run), options_(std::move(options)), writer_(run.folder(), options_.shard_bytes) {
  if (original.container() != Checkpoint::Container::safetensors) return;
  for (const TensorInfo& tensor : original.tensors())
    if (tensor.has_format && is_float(tensor.format)) vector_formats_[tensor.name] = tensor.format;
}

void HfSink::start(const Config& config, const std::vector<PlannedMatrix>& plan) {
  config_ = config;
  plan_ = plan;
  for (const PlannedMatrix& p : plan) schemes_[p.matrix.name] = p.scheme;
  std::vector<size_t> declared;  // tensors up to and with the embedding, layer 0, layer 1, ...
  declare(hf_globals(config));
  declared.push_back(writer_.n_declared());
  for (int l = 0; l < config.n_layers; ++l) {
    declare(hf_layer(config, original_, l));
    declared.push_back(writer_.n_declared());
  }
  declare(hf_prediction_layer(config, original_));
  const int done = run_.layers_done();
  write_companions();
  writer_.begin(done < 0 ? 0 : declared.at(static_cast<size_t>(done)));
  written_ = Checkpoint::open(run_.folder());
}

// The plan's, or for what is in no plan (router, prediction layer) the float type that it has; FP8 stays in FP8 files.
Scheme HfSink::scheme_of(const HfEntry& entry) const {
  if (const auto found = schemes_.find(entry.canonical); found != schemes_.end()) return found->second;
  if (options_.folded && entry.canonical.ends_with("ffn_gate_inp.weight")) return {Format::f32};
  const Format format = original_.linear(entry.canonical, entry.n_matrices, entry.out, entry.in).format;
  if (is_float(format) || (format == Format::fp8_block && options_.format == FileFormat::fp8)) return {format};
  return {Format::bf16};
}

Format HfSink::vector_format(const HfEntry& entry) const {
  if (options_.folded) return Format::f32;
  const std::string name = hf_name_of(entry.canonical);
  auto found = vector_formats_.find(name);
  if (found == vector_formats_.end() && name.starts_with("model.")) found = vector_formats_.find(name.substr(std::strlen("model.")));
  return found == vector_formats_.end() ? Format::f32 : found->second;
}

std::vector<HfSink::Stored> HfSink::stored(const HfEntry& entry, int expert) const {
  const std::string name = hf_name_of(entry.canonical, expert);
  if (entry.n_matrices == 0) return {{name, dtype_of(vector_format(entry)), {entry.out}}};
  const Scheme scheme = scheme_of(entry);
  const int64_t out = entry.out, in = entry.in;
  if (is_float(scheme.format)) return {{name, dtype_of(scheme.format), {out, in}}};
  if (scheme.format == Format::fp8_block)
    return {{name, "F8_E4M3", {out, in}},
            {name + "_scale_inv", "F32", {(out + kFp8Block - 1) / kFp8Block, (in + kFp8Block - 1) / kFp8Block}}};
  const int64_t per_word = 32 / planar_bits(scheme.format), n_groups = in / group_of(scheme, entry.in);
  const std::string module = module_of(name);
  if (options_.format == FileFormat::compressed_tensors) {
    std::vector<Stored> all{
        {name + "_packed", "I32", {out, in / per_word}}, {name + "_scale", "F16", {out, n_groups}}, {name + "_shape", "I64", {2}}};
    if (!scheme.symmetric) all.push_back({name + "_zero_point", "I32", {out / per_word, n_groups}});
    return all;
  }
  const bool awq = options_.format == FileFormat::awq;
  std::vector<Stored> all{
      {module + ".qweight", "I32", awq ? std::vector<int64_t>{in, out / per_word} : std::vector<int64_t>{in / per_word, out}},
      {module + ".qzeros", "I32", {n_groups, out / per_word}},
      {module + ".scales", "F16", {n_groups, out}}};
  if (!awq) all.push_back({module + ".g_idx", "I32", {in}});
  return all;
}

void HfSink::declare(const std::vector<HfEntry>& entries) {
  for (const HfEntry& entry : entries) {
    const bool stack = entry.canonical.find("_exps.") != std::string::npos;
    if (entry.n_matrices > 0) schemes_.try_emplace(entry.canonical, scheme_of(entry));
    for (int m = 0; m < std::max(1, entry.n_matrices); ++m)
      for (Stored& tensor : stored(entry, stack ? m : -1))
        writer_.declare(std::move(tensor.name), std::move(tensor.dtype), std::move(tensor.shape));
  }
}

void HfSink::write_vector(const HfEntry& entry, const Checkpoint& model) {
  const std::vector<float> values = model.vector(entry.canonical, entry.out);
  const Format format = vector_format(entry);
  std::vector<std::byte> bytes(row_bytes(format, entry.out));
  quantize_row(format, values.data(), entry.out, bytes.data());
  writer_.write(hf_name_of(entry.canonical), bytes);
}

void HfSink::write_matrix(const HfEntry& entry, int expert, const LinearSource& source) {
  const Scheme scheme = scheme_of(entry);
  const int matrix = std::max(0, expert);
  const WeightBytes& weight = source.matrices[static_cast<size_t>(matrix)];
  const std::vector<Stored> tensors = stored(entry, expert);
  const auto put = [&](size_t i, std::span<const std::byte> bytes) { writer_.write(tensors[i].name, bytes); };
  if (is_float(scheme.format)) {
    if (source.format == scheme.format) return put(0, weight.data);
    for (int r = 0; r < entry.out; ++r) put(0, row_as(scheme.format, source, matrix, r));
    return;
  }
  CACHALOT_CHECK(source.format == scheme.format, "{}: {} where {} was planned", source.name, info(source.format).name, name_of(scheme));
  switch (options_.format) {
    case FileFormat::fp8:
      put(0, weight.data);
      put(1, weight.scales);
      return;
    case FileFormat::awq: {
      const AwqWords words = pack_awq(source, matrix);
      put(0, words.qweight);
      put(1, words.qzeros);
      put(2, words.scales);
      return;
    }
    case FileFormat::gptq:
    case FileFormat::gptq_v2: {
      const GptqWords words = pack_gptq(source, matrix, options_.format == FileFormat::gptq ? GptqVersion::v1 : GptqVersion::v2);
      put(0, words.qweight);
      put(1, words.qzeros);
      put(2, words.scales);
      put(3, words.g_idx);
      return;
    }
    case FileFormat::compressed_tensors: {
      const PackQuantizedWords words = pack_quantized(source, matrix, scheme.symmetric);
      put(0, words.weight_packed);
      put(1, words.weight_scale);
      put(2, bytes_of_i64({entry.out, entry.in}));
      if (!scheme.symmetric) put(3, words.weight_zero_point);
      return;
    }
    case FileFormat::gguf: break;
  }
  CACHALOT_CHECK(false, "no directory format");
}

void HfSink::write(const std::vector<HfEntry>& entries, const Checkpoint& model) {
  for (const HfEntry& entry : entries) {
    if (entry.n_matrices == 0) {
      write_vector(entry, model);
      continue;
    }
    const bool stack = entry.canonical.find("_exps.") != std::string::npos;
    const LinearSource source = model.linear(entry.canonical, entry.n_matrices, entry.out, entry.in);
    for (int m = 0; m < entry.n_matrices; ++m) write_matrix(entry, stack ? m : -1, source);
  }
  writer_.sync();
  check(entries, model);
}

// What the files hold now against what was meant: all bits of codes, scales, zero points and vectors.
void HfSink::check(const std::vector<HfEntry>& entries, const Checkpoint& model) {
  for (const HfEntry& entry : entries) {
    bool good = false;
    if (entry.n_matrices == 0) {
      std::vector<float> values = model.vector(entry.canonical, entry.out);
      const std::vector<float> found = written_->vector(entry.canonical, entry.out);
      good = same(std::as_bytes(std::span(values)), std::as_bytes(std::span(found)));
    } else {
      const LinearSource meant = model.linear(entry.canonical, entry.n_matrices, entry.out, entry.in),
                         found = written_->linear(entry.canonical, entry.n_matrices, entry.out, entry.in);
      good = same_weights(meant, found);
    }
    if (!good)
      fail("{}: the tensor \"{}\" that was read back is not the one that was written", run_.folder().string(), hf_name_of(entry.canonical));
    ++n_checked_;
  }
}

void HfSink::globals(const Checkpoint& model) { write(hf_globals(config_), model); }

void HfSink::layer(int layer, const Checkpoint& model) { write(hf_layer(config_, original_, layer), model); }

void HfSink::finish() {
  write(hf_prediction_layer(config_, original_), original_);
  writer_.finish();
  run_.commit();
}

void HfSink::write_companions() const {
  std::vector<std::string> kept;
  const std::vector<HfEntry> prediction = hf_prediction_layer(config_, original_);
  const bool whole = std::none_of(prediction.begin(), prediction.end(), [&](const HfEntry& entry) {
    return entry.n_matrices > 0 && !is_float(schemes_.at(entry.canonical).format);
  });
  if (!prediction.empty() && whole) kept.push_back(fmt::format("model.layers.{}", config_.n_layers));
  write_hf_companions(run_.folder(), original_, config_,
                      {.quantization = quantization_config(options_.format, config_, plan_, kept),
                       .torch_dtype = options_.format == FileFormat::fp8 ? "" : "float16",
                       .companions = options_.companions,
                       .gptq_file = options_.format == FileFormat::gptq || options_.format == FileFormat::gptq_v2});
}

}  // namespace cachalot
