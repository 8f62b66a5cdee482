// Calibration data: the user's own text, domain by domain, made into token windows of equal length. Paragraphs that were there already are
// dropped; sets that are too small, or look like noise rather than text, are refused with the reason.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "quant/layer_runner.h"
#include "text/tokenizer.h"

namespace cachalot {

struct DomainText {
  std::string domain;
  std::string file;                    // for messages
  std::vector<std::string> documents;  // what documents_of gave
};

// Documents of a file's content. A name ending in .jsonl: a JSON object a line, with "text", or "prompt" and "completion", or "messages",
// which `render_chat` turns into text (null: their contents, a line each). Otherwise plain text, documents apart by two empty lines.
// Throws Error naming file and line.
using RenderChat = std::function<std::string(const std::string& messages_json)>;
std::vector<std::string> documents_of(const std::string& file, const std::string& content, const RenderChat& render_chat);

struct CalibrationOptions {
  int window = 512;          // tokens, BOS included
  int64_t tokens = 65536;    // to use, shared evenly among domains; a domain that has fewer gives what it has
  double held_out = 0.1;     // share of each domain's windows, at its end, that is kept for the report and never calibrated on
  int held_out_windows = 8;  // at most, of each domain
  int64_t min_tokens = 8192;
  int bos_id = -1;
  bool parse_special = false;  // control tokens in the text count: for what a chat template rendered
};

struct DomainStats {
  std::string domain, file;
  int64_t documents = 0, duplicates = 0;                  // paragraphs that were dropped
  int64_t bytes = 0, tokens = 0, used = 0, held_out = 0;  // tokens: after deduplication
  double repeated_triples = 0.0;                          // share of runs of three tokens that occur more than once
};

struct CalibrationSet {
  std::vector<DomainStats> domains;
  TokenStream calibration, held_out;  // domain: index into `domains`
};
// Throws Error naming the files when all domains together give fewer than min_tokens, one of them looks random, or (unless min_tokens is 0)
// one has no window.
CalibrationSet make_calibration_set(const Tokenizer& tokenizer, const std::vector<DomainText>& texts, const CalibrationOptions& options);

// Consecutive windows of a token sequence, each run alone behind BOS (perplexity's "windows" method), appended to `stream`.
void append_windows(TokenStream& stream, const std::vector<int>& tokens, int domain, int bos_id, int max_windows);

}  // namespace cachalot
