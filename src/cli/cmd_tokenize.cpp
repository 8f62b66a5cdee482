// cachalot tokenize: text to token ids and back.
#include <fmt/format.h>

#include <charconv>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json.h"
#include "cli/commands.h"
#include "cli/load_tokenizer.h"
#include "cli/read_file.h"

namespace cachalot {
namespace {

constexpr size_t kMaxInput = 1u << 30;  // bytes

struct TokenizeFlags {
  std::string tokenizer;
  std::vector<std::string> words;
  bool jsonl = false, decode = false, special = true, bos = false, json = false, count = false;
};

std::string dump(const nlohmann::ordered_json& value) {
  return value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

std::vector<int> parse_ids(std::string_view text, const Tokenizer& tokenizer) {
  std::vector<int> ids;
  constexpr std::string_view kBetween = " \t\r\n,[]";
  for (size_t at = text.find_first_not_of(kBetween); at != std::string_view::npos; at = text.find_first_not_of(kBetween, at)) {
    const size_t end = std::min(text.find_first_of(kBetween, at), text.size());
    const std::string_view word = text.substr(at, end - at);
    int id = -1;
    const auto [stop, problem] = std::from_chars(word.data(), word.data() + word.size(), id);
    if (problem != std::errc() || stop != word.data() + word.size() || id < 0 || id >= tokenizer.size())
      fail("found \"{}\", expected token ids of 0 to {}", printable(word), tokenizer.size() - 1);
    ids.push_back(id);
    at = end;
  }
  return ids;
}

// One line of --jsonl: {"text"} to {"ids"}, or with --decode the other way.
nlohmann::ordered_json convert_line(const Tokenizer& tokenizer, const TokenizeFlags& flags, std::string_view line, size_t number) {
  const JsonDocument document = JsonDocument::parse(line, fmt::format("line {}", number), {.max_bytes = kMaxInput});
  const JsonValue& root = document.root();
  if (!flags.decode) return {{"ids", tokenizer.encode(root.at("text").string(), {.add_bos = flags.bos, .parse_special = flags.special})}};
  std::vector<int> ids;
  const JsonValue list = root.at("ids");
  for (const auto element : list.array()) {
    const int64_t id = JsonValue(element, list.where()).integer();
    if (id < 0 || id >= tokenizer.size()) fail("{}: found {}, expected token ids of 0 to {}", list.where(), id, tokenizer.size() - 1);
    ids.push_back(static_cast<int>(id));
  }
  return {{"text", tokenizer.decode(ids, !flags.special)}};
}

void convert_lines(const Tokenizer& tokenizer, const TokenizeFlags& flags, std::string_view input) {
  std::string out;
  size_t number = 0;
  for (size_t begin = 0; begin < input.size();) {
    const size_t end = std::min(input.find('\n', begin), input.size());
    const std::string_view line = input.substr(begin, end - begin);
    begin = end + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    out += dump(convert_line(tokenizer, flags, line, number)) + "\n";
    if (out.size() > (1u << 20)) {
      write_out(out);
      out.clear();
    }
  }
  write_out(out);
}

void print_tokens(const Tokenizer& tokenizer, const TokenizeFlags& flags, const std::vector<int>& ids) {
  if (flags.json) {
    nlohmann::ordered_json out{{"count", ids.size()}, {"ids", ids}, {"pieces", nlohmann::ordered_json::array()}};
    for (const int id : ids) out["pieces"].push_back(std::string(tokenizer.piece(id)));
    return write_out(dump(out) + "\n");
  }
  if (flags.count) return write_out(fmt::format("{}\n", ids.size()));
  write_out(fmt::format("{}\n", fmt::join(ids, " ")));
}

int tokenize(const TokenizeFlags& flags) {
  const Tokenizer tokenizer = load_tokenizer(flags.tokenizer);
  const std::string input = flags.words.empty() ? read_standard_input(kMaxInput) : fmt::format("{}", fmt::join(flags.words, " "));
  if (flags.jsonl) {
    convert_lines(tokenizer, flags, input);
  } else if (flags.decode) {
    const std::string text = tokenizer.decode(parse_ids(input, tokenizer), !flags.special);
    write_out(flags.json ? dump({{"text", text}}) + "\n" : text + "\n");
  } else {
    print_tokens(tokenizer, flags, tokenizer.encode(input, {.add_bos = flags.bos, .parse_special = flags.special}));
  }
  return kExitOk;
}

}  // namespace

void add_tokenize_command(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand("tokenize", "Text to token ids, and back");
  auto flags = std::make_shared<TokenizeFlags>();
  command->footer(
      "Takes the words given, or the standard input as it is, a last line end included. Examples:\n"
      "  cachalot tokenize --tokenizer DeepSeek-V3/ 'Hello, world!'\n"
      "  cachalot tokenize --tokenizer model.gguf --decode 19923 14 2058\n"
      "  cachalot tokenize --tokenizer tokenizer.json --jsonl < texts.jsonl > ids.jsonl");
  command->add_option("--tokenizer,-m,--model", flags->tokenizer, "tokenizer.json, a directory with one, or a GGUF file")
      ->type_name("PATH")
      ->required();
  command->add_option("text", flags->words, "Text, or ids with --decode")->type_name("")->take_all();
  command->add_flag("--decode", flags->decode, "Ids to text");
  command->add_flag("--jsonl", flags->jsonl, "A JSON object per line: {\"text\"} in, {\"ids\"} out; with --decode the other way");
  command->add_flag("--special,!--no-special", flags->special,
                    "Control tokens spelled in the text count [yes]; with --decode they are shown");
  command->add_flag("--bos", flags->bos, "Begin with the BOS token");
  command->add_flag("--count", flags->count, "Print the number of tokens only");
  command->add_flag("--json", flags->json, "As JSON: count, ids, pieces");
  command->callback([flags, &context] { context.action = [flags] { return tokenize(*flags); }; });
}

}  // namespace cachalot
