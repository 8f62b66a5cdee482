// Reading tokenizer.json, with tokenizer_config.json and generation_config.json beside it.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/json.h"
#include "text/tokenizer.h"
#include "text/tokenizer_parts.h"
#include "text/unicode.h"

namespace cachalot {
namespace {

int token_id_from(const JsonValue& value) {
  const int64_t id = value.integer();
  if (id < 0 || id >= kMaxTokens) fail("{}: found id {}, expected 0 to {}", value.where(), id, kMaxTokens - 1);
  return static_cast<int>(id);
}

// One past the highest id of the vocabulary and the added tokens. Checked before the table of tokens is made.
size_t count_ids(const JsonValue& vocab, const std::optional<JsonValue>& added) {
  int highest = -1;
  for (const auto [text, element] : vocab.object()) {
    int64_t id = 0;
    if (element.get(id) != simdjson::SUCCESS || id < 0 || id >= kMaxTokens)
      fail("{}: \"{}\": found {}, expected an id from 0 to {}", vocab.where(), printable(text), printable(simdjson::minify(element)),
           kMaxTokens - 1);
    highest = std::max(highest, static_cast<int>(id));
  }
  if (added) {
    for (const auto element : added->array()) highest = std::max(highest, token_id_from(JsonValue(element, added->where()).at("id")));
  }
  return static_cast<size_t>(highest + 1);
}

void read_vocab(const JsonValue& vocab, Vocabulary& out) {
  for (const auto [text, element] : vocab.object()) {
    const int id = static_cast<int>(element.get_int64().value());
    if (text.empty()) fail("{}: found an empty token with id {}, expected text", vocab.where(), id);
    if (out.find_text(text)) fail("{}: found the token \"{}\" twice, expected it once", vocab.where(), printable(text));
    if (!out.set(id, text, TokenKind::kNormal))
      fail("{}: found id {} for both \"{}\" and \"{}\", expected one token for each id", vocab.where(), id, printable(out.text(id)),
           printable(text));
  }
}

void read_added_token(const JsonValue& value, TokenizerParts& parts) {
  const int id = token_id_from(value.at("id"));
  const std::string_view content = value.at("content").string();
  if (content.empty() || content.size() > kMaxAddedToken)
    fail("{}: content: found {} bytes, expected 1 to {}", value.where(), content.size(), kMaxAddedToken);
  Vocabulary& vocabulary = parts.vocabulary;
  const auto known = vocabulary.find_text(content);
  if (known && *known != id) fail("{}: found id {} for \"{}\", which has the id {} already", value.where(), id, printable(content), *known);
  const bool control = value.boolean_or("special", false) || looks_like_control(content);
  const TokenKind kind = control ? TokenKind::kControl : TokenKind::kUserDefined;
  if (known) {
    vocabulary.set_kind(id, kind);
  } else if (!vocabulary.set(id, content, kind)) {
    fail("{}: found id {} for \"{}\", expected a free one: it is the id of \"{}\"", value.where(), id, printable(content),
         printable(vocabulary.text(id)));
  }
  const AddedToken token{.id = id,
                         .control = control,
                         .single_word = value.boolean_or("single_word", false),
                         .strip_left = value.boolean_or("lstrip", false),
                         .strip_right = value.boolean_or("rstrip", false)};
  if (value.boolean_or("normalized", false)) {
    parts.normalized_added.add(parts.nfc ? unicode::nfc(content) : std::string(content), token);
  } else {
    parts.raw_added.add(content, token);
  }
}

void read_merges(const JsonValue& list, const Vocabulary& vocabulary, Bpe& bpe) {
  const auto array = list.array();
  size_t n = 0;  // array.size() saturates at 2^24 - 1
  for ([[maybe_unused]] const auto element : array) ++n;
  if (n > kMaxMerges) fail("{}: found {} merges, expected at most {}", list.where(), n, kMaxMerges);
  bpe = Bpe(n);
  size_t i = 0;
  for (const auto element : array) {
    std::string_view text;
    if (element.get(text) == simdjson::SUCCESS) {
      const size_t space = text.find(' ');
      if (space == std::string_view::npos || text.find(' ', space + 1) != std::string_view::npos)
        fail("{}[{}]: found \"{}\", expected two tokens with a space between them", list.where(), i, printable(text));
      add_merge(bpe, vocabulary, text.substr(0, space), text.substr(space + 1), list.where(), i);
    } else {
      simdjson::dom::array sides;
      std::string_view left, right;
      if (element.get(sides) != simdjson::SUCCESS || sides.size() != 2 || sides.at(0).get(left) != simdjson::SUCCESS ||
          sides.at(1).get(right) != simdjson::SUCCESS)
        fail("{}[{}]: found {}, expected two tokens", list.where(), i, printable(simdjson::minify(element)));
      add_merge(bpe, vocabulary, left, right, list.where(), i);
    }
    ++i;
  }
}

// Of the model's switches, those that byte-level BPE does not use must be off.
void check_model(const JsonValue& model) {
  const std::string type = model.string_or("type", "BPE");
  if (type != "BPE") fail("{}: type: found \"{}\", expected BPE", model.where(), printable(type));
  for (const char* key : {"byte_fallback", "fuse_unk"}) {
    if (model.boolean_or(key, false)) fail("{}: {}: found true, expected false: only byte-level BPE is supported", model.where(), key);
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const std::string text = model.string_or(key, "");
    if (!text.empty()) fail("{}: {}: found \"{}\", expected none", model.where(), key, printable(text));
  }
  if (model.number_or("dropout", 0.0) != 0.0) fail("{}: dropout: found {}, expected none", model.where(), model.number_or("dropout", 0.0));
}

bool reads_nfc(const JsonValue& value) {
  const std::string_view type = value.at("type").string();
  if (type == "NFC") return true;
  if (type != "Sequence") fail("{}: type: found \"{}\", expected NFC or an empty Sequence", value.where(), printable(type));
  const JsonValue list = value.at("normalizers");
  bool nfc = false;
  for (const auto element : list.array()) nfc |= reads_nfc(JsonValue(element, list.where()));
  return nfc;
}

// The token that TemplateProcessing puts before a single text, if any.
std::optional<int> template_bos(const JsonValue& value) {
  const std::string_view type = value.at("type").string();
  std::optional<int> bos;
  if (type == "Sequence") {
    const JsonValue list = value.at("processors");
    for (const auto element : list.array()) {
      if (const auto found = template_bos(JsonValue(element, list.where()))) bos = found;
    }
    return bos;
  }
  if (type == "ByteLevel") return bos;
  if (type != "TemplateProcessing")
    fail("{}: type: found \"{}\", expected ByteLevel, TemplateProcessing or a Sequence of them", value.where(), printable(type));
  const JsonValue list = value.at("single");
  for (const auto element : list.array()) {
    const JsonValue step(element, list.where());
    const auto special = step.find("SpecialToken");
    if (!special) break;
    if (bos) fail("{}: found several tokens before the text, expected at most one", list.where());
    const JsonValue ids = value.at("special_tokens").at(special->at("id").string()).at("ids");
    const auto array = ids.array();
    if (array.size() != 1) fail("{}: found {} ids, expected one", ids.where(), array.size());
    bos = token_id_from(JsonValue(array.at(0).value(), ids.where()));
  }
  return bos;
}

void check_decoder(const JsonValue& value) {
  const std::string_view type = value.at("type").string();
  if (type != "ByteLevel") fail("{}: type: found \"{}\", expected ByteLevel", value.where(), printable(type));
}

// A token named by tokenizer_config.json: a string, or an object with `content`.
std::optional<int> named_token(const JsonValue& config, std::string_view key, const Vocabulary& vocabulary) {
  const auto value = config.find(key);
  if (!value) return std::nullopt;
  const std::string_view text = value->is_object() ? value->at("content").string() : value->string();
  const auto id = vocabulary.find_text(text);
  if (!id) fail("{}: found \"{}\", expected a token of the vocabulary", value->where(), printable(text));
  return id;
}

// A string, or a list of named templates of which "default" counts, else the first.
std::string chat_template_of(const JsonValue& value) {
  if (value.is_string()) return std::string(value.string());
  std::optional<std::string> chosen;
  for (const auto element : value.array()) {
    const JsonValue entry(element, value.where());
    if (!chosen || entry.at("name").string() == "default") chosen = std::string(entry.at("template").string());
  }
  return chosen.value_or("");
}

void read_tokenizer_config(std::string_view text, TokenizerParts& parts) {
  const JsonDocument document = JsonDocument::parse(text, "tokenizer_config.json");
  const JsonValue& config = document.root();
  if (const auto bos = named_token(config, "bos_token", parts.vocabulary)) parts.bos = bos;
  parts.eos = named_token(config, "eos_token", parts.vocabulary);
  if (parts.eos) add_eos(parts, *parts.eos);
  parts.pad = named_token(config, "pad_token", parts.vocabulary);
  parts.add_bos = config.boolean_or("add_bos_token", parts.add_bos);
  if (const auto value = config.find("chat_template")) parts.chat_template = chat_template_of(*value);
}

void read_generation_config(std::string_view text, TokenizerParts& parts) {
  const JsonDocument document = JsonDocument::parse(text, "generation_config.json");
  const auto add = [&parts](const JsonValue& value) {
    const int id = token_id_from(value);
    if (!parts.eos) parts.eos = id;
    add_eos(parts, id);
  };
  const auto value = document.root().find("eos_token_id");
  if (!value) return;
  if (!value->is_array()) return add(*value);
  for (const auto element : value->array()) add(JsonValue(element, value->where()));
}

}  // namespace

Tokenizer Tokenizer::from_json(std::string_view text, std::string name, const TokenizerOptions& options) {
  const JsonDocument document = JsonDocument::parse(text, name);
  const JsonValue& root = document.root();
  auto parts = std::make_unique<TokenizerParts>();
  parts->name = std::move(name);

  const JsonValue model = root.at("model");
  check_model(model);
  const JsonValue vocab = model.at("vocab");
  const auto added = root.find("added_tokens");
  parts->vocabulary = Vocabulary(count_ids(vocab, added));
  read_vocab(vocab, parts->vocabulary);
  read_merges(model.at("merges"), parts->vocabulary, parts->bpe);
  parts->ignore_merges = model.boolean_or("ignore_merges", false);
  if (const auto normalizer = root.find("normalizer")) parts->nfc = reads_nfc(*normalizer);
  parts->pre = PreTokenizer::from_json(root.at("pre_tokenizer"));
  if (const auto decoder = root.find("decoder")) check_decoder(*decoder);
  if (added) {
    size_t i = 0;
    for (const auto element : added->array()) read_added_token(JsonValue(element, fmt::format("{}[{}]", added->where(), i++)), *parts);
  }
  if (parts->vocabulary.size() == 0) fail("{}: found no tokens, expected some", vocab.where());
  const std::string unknown = model.string_or("unk_token", "");
  parts->bpe.set_bytes(parts->vocabulary, parts->vocabulary.find_text(unknown).value_or(-1));

  if (const auto processor = root.find("post_processor")) parts->bos = template_bos(*processor);
  if (parts->bos && !parts->vocabulary.contains(*parts->bos))
    fail("{}: post_processor: found id {}, expected 0 to {}", parts->name, *parts->bos, parts->vocabulary.size() - 1);
  parts->add_bos = parts->bos.has_value();
  if (!options.tokenizer_config.empty()) read_tokenizer_config(options.tokenizer_config, *parts);
  if (!options.generation_config.empty()) read_generation_config(options.generation_config, *parts);
  for (const int id : options.eos_ids) add_eos(*parts, id);
  if (!parts->eos && !parts->eos_ids.empty()) parts->eos = parts->eos_ids.front();
  parts->add_bos = options.add_bos.value_or(parts->add_bos);
  if (!options.chat_template.empty()) parts->chat_template = options.chat_template;
  return Tokenizer(std::move(parts));
}

}  // namespace cachalot
