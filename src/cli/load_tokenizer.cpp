// Finds and reads tokenizers.
#include "cli/load_tokenizer.h"

#include <limits>

#include "base/error.h"
#include "cli/read_file.h"

namespace cachalot {
namespace {

constexpr size_t kMaxTokenizerBytes = 64u << 20, kMaxConfigBytes = 8u << 20;

std::optional<int64_t> token_key(const GgufFile& gguf, const char* key) { return gguf.integer(std::string("tokenizer.ggml.") + key); }

std::string read_beside(const std::filesystem::path& path, size_t limit) {
  return std::filesystem::exists(path) ? read_input_file(path, limit) : std::string();
}

Tokenizer tokenizer_from_directory(const std::filesystem::path& directory, const std::filesystem::path& file) {
  const std::string config = read_beside(directory / "tokenizer_config.json", kMaxConfigBytes);
  const std::string generation = read_beside(directory / "generation_config.json", kMaxConfigBytes);
  return Tokenizer::from_json(read_input_file(file, kMaxTokenizerBytes), file.string(),
                              {.tokenizer_config = config, .generation_config = generation});
}

}  // namespace

VocabData vocab_data_of(const GgufFile& gguf) {
  VocabData data;
  data.name = gguf.name();
  data.model = gguf.string("tokenizer.ggml.model").value_or("");
  data.pre = gguf.string("tokenizer.ggml.pre").value_or("");
  if (data.model.empty()) fail("{}: tokenizer.ggml.model: found nothing, expected gpt2: the file holds no tokenizer", gguf.name());
  const auto* tokens = gguf.strings("tokenizer.ggml.tokens");
  if (tokens == nullptr) fail("{}: tokenizer.ggml.tokens: found nothing, expected a list of strings", gguf.name());
  data.tokens = *tokens;
  if (const auto* merges = gguf.strings("tokenizer.ggml.merges")) data.merges = *merges;
  if (const auto* types = gguf.integers("tokenizer.ggml.token_type")) {
    data.types.reserve(types->size());
    for (const int64_t type : *types) {
      if (type < 0 || type > std::numeric_limits<int32_t>::max())
        fail("{}: tokenizer.ggml.token_type: found {}, expected 1 to 6", gguf.name(), type);
      data.types.push_back(static_cast<int32_t>(type));
    }
  }
  data.bos = token_key(gguf, "bos_token_id");
  data.eos = token_key(gguf, "eos_token_id");
  data.eot = token_key(gguf, "eot_token_id");
  data.eom = token_key(gguf, "eom_token_id");
  data.pad = token_key(gguf, "padding_token_id");
  data.unknown = token_key(gguf, "unknown_token_id");
  data.add_bos = gguf.boolean("tokenizer.ggml.add_bos_token");
  data.chat_template = gguf.string("tokenizer.chat_template").value_or("");
  return data;
}

Tokenizer tokenizer_of(const Checkpoint& checkpoint, const std::vector<int>& eos_ids) {
  if (const GgufFile* gguf = checkpoint.gguf()) return Tokenizer::from_vocab(vocab_data_of(*gguf));
  const std::string json = checkpoint.tokenizer_json();
  if (json.empty()) fail("{}: found no tokenizer.json beside the weights; name one with --tokenizer", checkpoint.name());
  const std::string config = checkpoint.tokenizer_config_json(), generation = checkpoint.generation_config_json();
  return Tokenizer::from_json(json, checkpoint.name() + "/tokenizer.json",
                              {.tokenizer_config = config, .generation_config = generation, .eos_ids = eos_ids});
}

Tokenizer load_tokenizer(const std::filesystem::path& path) {
  if (!std::filesystem::exists(path)) fail("{}: no such file or directory", path.string());
  if (path.extension() == ".gguf") return Tokenizer::from_vocab(vocab_data_of(*GgufFile::open(path)));
  if (!std::filesystem::is_directory(path)) return tokenizer_from_directory(path.parent_path(), path);
  if (std::filesystem::exists(path / "tokenizer.json")) return tokenizer_from_directory(path, path / "tokenizer.json");
  return tokenizer_of(*Checkpoint::open(path, PackedModels::accept));
}

int bos_before_text(const Tokenizer& tokenizer, const Config& config) {
  return tokenizer.add_bos() ? tokenizer.bos().value_or(config.bos_id) : -1;
}

}  // namespace cachalot
