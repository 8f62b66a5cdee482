// The plan as GGUF types.
#include "quant/gguf_sink.h"

#include "base/error.h"
#include "convert/hf_view.h"

namespace cachalot {
namespace {

constexpr const char* kFile = "model.gguf";  // in the folder of a run

}  // namespace

GgufSink::GgufSink(const Checkpoint& original, std::filesystem::path out, int file_type,
                   std::vector<std::pair<std::string, std::string>> metadata, PartialRun* run)
    : original_(original), out_(std::move(out)), file_type_(file_type), metadata_(std::move(metadata)), run_(run) {
  if (run_ != nullptr) out_ = run_->folder() / kFile;
}

void GgufSink::start(const Config& config, const std::vector<PlannedMatrix>& plan) {
  std::map<std::string, Format> formats;
  std::string fallbacks;
  for (const PlannedMatrix& p : plan) {
    if (info(p.scheme.format).gguf_type < 0)
      fail("{}: {} has no place in a GGUF file; choose a block type such as q4_k", p.matrix.name, name_of(p.scheme));
    formats[p.matrix.name] = p.scheme.format;
    if (p.fell_back()) fallbacks += fmt::format("{}{}: {}", fallbacks.empty() ? "" : "; ", p.matrix.name, name_of(p.scheme));
  }
  ConvertOptions options{.format = Format::bf16, .progress = {}};
  options.format_of = [formats](const std::string& name) {
    const auto found = formats.find(name);
    CACHALOT_CHECK(found != formats.end(), "{} is not planned", name);
    return found->second;
  };
  options.file_type = file_type_;
  options.metadata = metadata_;
  if (!fallbacks.empty()) options.metadata.emplace_back("cachalot.quantize.fallbacks", fallbacks);
  if (run_ != nullptr) options.layers_done = run_->layers_done();
  writer_ = std::make_unique<GgufModelWriter>(original_, out_, options);
  if (run_ == nullptr) return;
  file_ = Checkpoint::open(out_);
  Config by_halves = config;
  if (original_.gguf() == nullptr) view_ = make_hf_view(*file_, by_halves, /*whole_kv_b=*/false);
}

void GgufSink::globals(const Checkpoint& model) {
  writer_->globals(model);
  if (run_ != nullptr) writer_->sync();
}

void GgufSink::layer(int layer, const Checkpoint& model) {
  writer_->layer(layer, model);
  if (run_ != nullptr) writer_->sync();
}

void GgufSink::finish() {
  result_ = writer_->finish();
  if (run_ == nullptr) return;
  view_.reset();
  file_.reset();
  run_->commit_file(kFile);
}

int gguf_file_type(std::string_view name) {
  constexpr std::pair<std::string_view, int> kTypes[] = {{"f32", 0},   {"f16", 1},     {"q4_0", 2},    {"q4_1", 3},  {"q8_0", 7},
                                                         {"q5_0", 8},  {"q5_1", 9},    {"q2_k", 10},   {"q3_k", 12}, {"q4_k_s", 14},
                                                         {"q4_k", 15}, {"q4_k_m", 15}, {"q5_k_s", 16}, {"q5_k", 17}, {"q5_k_m", 17},
                                                         {"q6_k", 18}, {"iq4_nl", 25}, {"iq4_xs", 30}, {"bf16", 32}};
  for (const auto& [type, number] : kTypes)
    if (type == name) return number;
  return -1;
}

std::optional<std::map<std::string, Scheme>> gguf_mix(std::string_view name, const Config& config, bool split_kv_b) {
  const bool four = name.starts_with("q4_k_"), medium = name.ends_with("_m");
  if (name != "q4_k_m" && name != "q4_k_s" && name != "q5_k_m" && name != "q5_k_s") return std::nullopt;
  const int n = config.n_layers;
  const auto more_bits = [&](int l) { return l < n / 8 || l >= 7 * n / 8 || (l - n / 8) % 3 == 2; };
  std::map<std::string, Scheme> out;
  for (const ModelMatrix& m : model_matrices(config, split_kv_b)) {
    Format format = four ? Format::q4_k : Format::q5_k;
    if (m.name == "output.weight" || (m.name == "token_embd.weight" && config.tied_head)) {
      format = Format::q6_k;
    } else if (m.name.starts_with("blk.")) {
      const int layer = std::atoi(m.name.c_str() + 4);
      const std::string_view tensor = std::string_view(m.name).substr(m.name.find('.', 4) + 1);
      const bool value = tensor == "attn_v.weight" || tensor == "attn_kv_b.weight" || tensor == "attn_v_b.weight";
      const bool down = tensor.starts_with("ffn_down");
      if (medium && (value || down) && more_bits(layer)) format = Format::q6_k;
      if (!medium && four && ((value && layer < 4) || (down && layer < n / 8))) format = Format::q5_k;
      if (tensor == "attn_k_b.weight") format = Format::q8_0;
    }
    out[m.name] = {format};
  }
  return out;
}

}  // namespace cachalot
