// What the commands of `eval` share: texts by domain, how they are cut into windows, and how a divergence is told.
#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/load_model.h"
#include "cli/run_flags.h"
#include "eval/divergence.h"
#include "eval/perplexity.h"

namespace cachalot {

struct TextFlags {
  std::string file, method;
  std::vector<std::string> domains;
  int window = 512, windows = 0;
  bool no_bos = false;
};
// -f, --domain, --method, --window, --windows, --no-bos; method and windows as they stand are the defaults.
void add_text_flags(CLI::App& command, TextFlags& flags);
// --json, -q.
void add_output_flags(CLI::App& command, bool& json, bool& quiet);

struct DomainTokens {
  std::string domain, file;
  std::vector<int> tokens;
};
// The texts that the flags name, as windows of `options` want them. Throws Error when there are none.
std::vector<DomainTokens> read_domains(const TextFlags& flags, const Tokenizer& tokenizer, const PerplexityOptions& options);
// Method, window and BOS, which goes before windows if the tokenizer adds one.
PerplexityOptions method_options(const TextFlags& flags, const LoadedModel& model);
// A line on stderr that says how far it is, when that is a terminal: "3/8 windows, perplexity 4.2".
std::function<void(int, int, double)> window_progress(bool quiet, const std::string& what);
void end_progress(bool quiet);

// Two words around an equals sign. Throws Error naming the flag.
std::pair<std::string, std::string> split_flag(const std::string& text, const char* flag, const char* expected);

nlohmann::ordered_json divergence_json(const Divergence& d);
// All statistics, under llama-perplexity's names and in its order.
std::string divergence_text(const Divergence& d);
struct DomainDivergence {
  std::string domain;
  Divergence divergence;
};
// A line for each domain, as a Markdown table.
std::string divergence_table(const std::vector<DomainDivergence>& domains);

}  // namespace cachalot
