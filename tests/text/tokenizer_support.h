// Reading the tokenizers and golden files of the test data.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "text/tokenizer.h"

namespace cachalot::test {

struct GoldenCase {
  std::string text;
  std::vector<int> ids;
  std::string decoded;
};

// CPU seconds of this process: time limits in tests must not depend on what else the machine does.
double cpu_seconds();

std::string read_file(const std::filesystem::path& path);
// Whether tokenizers/<name> was unpacked; two of six need CACHALOT_EXTRA_DATA.
bool has_tokenizer(const std::string& name);
// tokenizers/<name>/tokenizer.json with its tokenizer_config.json when there is one.
Tokenizer load_tokenizer(const std::string& name);
Tokenizer load_tiny_v2();
// token-golden/<name>.jsonl.
std::vector<GoldenCase> load_golden(const std::string& name);

// A small byte-level tokenizer.json: all 256 bytes (ids 0 to 255), then the results of `merges` ("a b", byte alphabet) in order, then
// one special token <|end|>. `extra` is put into the top object, e.g. R"("normalizer": null,)".
std::string small_tokenizer_json(const std::vector<std::string>& merges, const std::string& extra = "");

}  // namespace cachalot::test
