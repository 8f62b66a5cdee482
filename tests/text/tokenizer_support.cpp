// Reading the tokenizers and golden files of the test data.
#include "text/tokenizer_support.h"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "support/support.h"
#include "text/unicode.h"

namespace cachalot::test {

double cpu_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + path.string());
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

bool has_tokenizer(const std::string& name) { return std::filesystem::exists(testdata("tokenizers/" + name + "/tokenizer.json")); }

namespace {
Tokenizer load_from(const std::filesystem::path& folder) {
  const std::string json = read_file(folder / "tokenizer.json");
  const auto config_path = folder / "tokenizer_config.json";
  const std::string config = std::filesystem::exists(config_path) ? read_file(config_path) : "";
  TokenizerOptions options;
  options.tokenizer_config = config;
  return Tokenizer::from_json(json, "tokenizer.json", options);
}
}  // namespace

Tokenizer load_tokenizer(const std::string& name) { return load_from(testdata("tokenizers/" + name)); }
Tokenizer load_tiny_v2() { return load_from(testdata("tiny-v2")); }

std::vector<GoldenCase> load_golden(const std::string& name) {
  std::vector<GoldenCase> cases;
  std::istringstream lines(read_file(testdata("token-golden/" + name + ".jsonl")));
  for (std::string line; std::getline(lines, line);) {
    const auto json = nlohmann::json::parse(line);
    cases.push_back({json["text"], json["ids"].get<std::vector<int>>(), json["decoded"]});
  }
  return cases;
}

std::string small_tokenizer_json(const std::vector<std::string>& merges, const std::string& extra) {
  nlohmann::ordered_json vocab = nlohmann::ordered_json::object();
  for (int byte = 0; byte < 256; ++byte) {
    const char c = static_cast<char>(byte);
    vocab[unicode::bytes_to_alphabet({&c, 1})] = byte;
  }
  int next = 256;
  for (const std::string& merge : merges) {
    std::string token = merge;
    token.erase(std::remove(token.begin(), token.end(), ' '), token.end());
    if (!vocab.contains(token)) vocab[token] = next++;
  }
  const nlohmann::ordered_json merge_list = merges;
  return fmt::format(R"({{{}"added_tokens": [{{"id": {}, "content": "<|end|>", "special": true}}],
    "pre_tokenizer": {{"type": "ByteLevel", "add_prefix_space": false, "use_regex": true}},
    "model": {{"type": "BPE", "vocab": {}, "merges": {}}}}})",
                     extra, next, vocab.dump(), merge_list.dump());
}

}  // namespace cachalot::test
