// Documents, deduplication, sampling.
#include "quant/calibration.h"

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "base/error.h"

namespace cachalot {
namespace {

constexpr double kLeastRepeatedTriples = 0.03;  // of 8,192 tokens; prose in the tested languages has 0.1 and more, noise 0.01

std::string document_of(const nlohmann::json& line, const std::string& file, size_t number, const RenderChat& render_chat) {
  const auto text = [&](const char* key) -> const std::string* {
    const auto found = line.find(key);
    if (found == line.end()) return nullptr;
    if (!found->is_string()) fail("{}: line {}: \"{}\": found {}, expected a string", file, number, key, found->type_name());
    return found->get_ptr<const std::string*>();
  };
  if (const std::string* whole = text("text")) return *whole;
  if (const std::string* prompt = text("prompt")) {
    const std::string* completion = text("completion");
    return completion != nullptr ? *prompt + *completion : *prompt;
  }
  const auto messages = line.find("messages");
  if (messages == line.end()) fail("{}: line {}: found none of \"text\", \"prompt\" and \"messages\"", file, number);
  if (!messages->is_array() || messages->empty()) fail("{}: line {}: \"messages\": expected a list that is not empty", file, number);
  if (render_chat) return render_chat(messages->dump());
  std::string out;
  for (const auto& message : *messages) {
    const auto content = message.is_object() ? message.find("content") : message.end();
    if (!message.is_object() || content == message.end() || !content->is_string())
      fail("{}: line {}: a message without a \"content\" string", file, number);
    out += content->get<std::string>() + "\n";
  }
  return out;
}

double repeated_triples(const std::vector<int>& tokens) {
  constexpr size_t kSample = 8192;  // the share grows with the length
  const size_t n = std::min(tokens.size(), kSample);
  if (n < 3) return 0.0;
  std::map<std::array<int, 3>, int> seen;
  for (size_t i = 0; i + 2 < n; ++i) ++seen[{tokens[i], tokens[i + 1], tokens[i + 2]}];
  int64_t repeated = 0;
  for (const auto& [triple, count] : seen) repeated += count > 1 ? count : 0;
  return static_cast<double>(repeated) / static_cast<double>(n - 2);
}

// The documents' paragraphs that no earlier one equals, short ones aside.
std::string deduplicated(const std::vector<std::string>& documents, std::unordered_set<std::string>& seen, DomainStats& stats) {
  constexpr size_t kShort = 40;  // bytes: headings and the like repeat for good reasons
  std::string out;
  for (const std::string& document : documents) {
    ++stats.documents;
    for (size_t begin = 0; begin < document.size();) {
      size_t end = document.find("\n\n", begin);
      end = end == std::string::npos ? document.size() : end + 2;
      const std::string paragraph = document.substr(begin, end - begin);
      begin = end;
      if (paragraph.size() >= kShort && !seen.insert(paragraph).second) {
        ++stats.duplicates;
        continue;
      }
      out += paragraph;
    }
    out += "\n\n";
  }
  return out;
}

}  // namespace

std::vector<std::string> documents_of(const std::string& file, const std::string& content, const RenderChat& render_chat) {
  std::vector<std::string> out;
  if (file.ends_with(".jsonl") || file.ends_with(".json")) {
    size_t number = 0;
    for (size_t begin = 0; begin < content.size();) {
      const size_t end = std::min(content.find('\n', begin), content.size());
      const std::string_view line = std::string_view(content).substr(begin, end - begin);
      begin = end + 1;
      ++number;
      if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
      nlohmann::json parsed = nlohmann::json::parse(line, nullptr, false);
      if (parsed.is_discarded() || !parsed.is_object()) fail("{}: line {}: expected a JSON object", file, number);
      out.push_back(document_of(parsed, file, number, render_chat));
    }
    return out;
  }
  for (size_t begin = 0; begin < content.size();) {
    size_t end = content.find("\n\n\n", begin);
    end = end == std::string::npos ? content.size() : end;
    out.push_back(content.substr(begin, end - begin));
    begin = std::min(end + 3, content.size());
  }
  return out;
}

void append_windows(TokenStream& stream, const std::vector<int>& tokens, int domain, int bos_id, int max_windows) {
  const auto window = static_cast<size_t>(stream.window);
  size_t at = 0;
  // Without BOS the first token of a window is only read, and predicts the next.
  const size_t read_ahead = bos_id >= 0 ? 0 : 1;
  for (int w = 0; at + window + read_ahead <= tokens.size() && (max_windows <= 0 || w < max_windows); ++w, at += window) {
    const auto first = tokens.begin() + static_cast<ptrdiff_t>(at), last = first + static_cast<ptrdiff_t>(window);
    if (bos_id >= 0) {
      stream.inputs.push_back(bos_id);
      stream.inputs.insert(stream.inputs.end(), first, last - 1);
      stream.targets.insert(stream.targets.end(), first, last);
    } else {
      stream.inputs.insert(stream.inputs.end(), first, last);
      stream.targets.insert(stream.targets.end(), first + 1, last + 1);
    }
    stream.domain.push_back(domain);
  }
}

CalibrationSet make_calibration_set(const Tokenizer& tokenizer, const std::vector<DomainText>& texts, const CalibrationOptions& options) {
  CalibrationSet set;
  set.calibration.window = set.held_out.window = options.window;
  std::unordered_set<std::string> seen;
  std::vector<TokenStream> windows;
  for (const DomainText& text : texts) {
    // Several files may belong to one domain.
    auto found = std::find_if(set.domains.begin(), set.domains.end(), [&](const DomainStats& d) { return d.domain == text.domain; });
    if (found == set.domains.end()) {
      set.domains.push_back({.domain = text.domain, .file = text.file});
      windows.push_back({.window = options.window});
      found = set.domains.end() - 1;
    }
    DomainStats& stats = *found;
    const auto domain = static_cast<size_t>(found - set.domains.begin());
    const std::string whole = deduplicated(text.documents, seen, stats);
    stats.bytes += static_cast<int64_t>(whole.size());
    const std::vector<int> tokens = tokenizer.encode(whole, {.parse_special = options.parse_special});
    stats.tokens += static_cast<int64_t>(tokens.size());
    stats.repeated_triples = repeated_triples(tokens);
    if (tokens.size() >= 2048 && stats.repeated_triples < kLeastRepeatedTriples)
      fail(
          "{}: looks random: {:.1f}% of its runs of three tokens occur more than once, where text has 10% and more; calibrating on noise "
          "spoils a "
          "model",
          text.file, 100.0 * stats.repeated_triples);
    append_windows(windows[domain], tokens, static_cast<int>(domain), options.bos_id, 0);
  }
  const auto take = [&](TokenStream& to, const TokenStream& from, int w) {
    const auto begin = static_cast<ptrdiff_t>(w) * options.window, end = begin + options.window;
    to.inputs.insert(to.inputs.end(), from.inputs.begin() + begin, from.inputs.begin() + end);
    to.targets.insert(to.targets.end(), from.targets.begin() + begin, from.targets.begin() + end);
    to.domain.push_back(from.domain[static_cast<size_t>(w)]);
  };
  int64_t available = 0;
  std::vector<int> usable(windows.size());
  for (size_t d = 0; d < windows.size(); ++d) {
    const int n = windows[d].n_windows();
    const int held_out = std::min(options.held_out_windows, static_cast<int>(n * options.held_out));
    usable[d] = n - held_out;
    available += int64_t{usable[d]} * options.window;
    for (int w = n - held_out; w < n; ++w) take(set.held_out, windows[d], w);
    set.domains[d].held_out = int64_t{held_out} * options.window;
  }
  if (available < options.min_tokens) {
    std::string files;
    int64_t duplicates = 0;
    for (const DomainStats& d : set.domains) {
      files += (files.empty() ? "" : ", ") + d.file;
      duplicates += d.duplicates;
    }
    fail("{}: {} tokens to calibrate on in whole windows of {}, expected at least {}: statistics of fewer do not hold for other text{}",
         files, available, options.window, options.min_tokens,
         duplicates > 0 ? fmt::format(" ({} repeated paragraphs were dropped)", duplicates) : "");
  }
  for (size_t d = 0; d < windows.size() && options.min_tokens > 0; ++d)
    if (usable[d] == 0)
      fail("{}: {} tokens, expected at least one window of {} beside what is held out: \"{}\" would not be calibrated on",
           set.domains[d].file, set.domains[d].tokens, options.window, set.domains[d].domain);
  // Even shares, what small domains leave going to the others; within a domain windows are spread evenly.
  auto left = static_cast<int>(std::max<int64_t>(1, options.tokens / options.window));
  std::vector<size_t> order(windows.size());
  for (size_t d = 0; d < order.size(); ++d) order[d] = d;
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return usable[a] < usable[b]; });
  for (size_t i = 0; i < order.size(); ++i) {
    const size_t d = order[i];
    const int share = (left + static_cast<int>(order.size() - i) - 1) / static_cast<int>(order.size() - i), n = std::min(share, usable[d]);
    for (int w = 0; w < n; ++w) take(set.calibration, windows[d], static_cast<int>(int64_t{w} * usable[d] / n));
    set.domains[d].used = int64_t{n} * options.window;
    left -= n;
  }
  return set;
}

}  // namespace cachalot
