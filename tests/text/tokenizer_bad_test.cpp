// Bad tokenizer files: each refused quickly, with file, field, what was found and what was expected.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/support.h"
#include "text/tokenizer.h"
#include "text/tokenizer_support.h"

namespace cachalot::test {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

// A tokenizer.json from its parts, each of which a case may spoil.
struct Parts {
  std::string model = R"("type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"])";
  std::string pre = R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true})";
  std::string rest;
  [[nodiscard]] std::string json() const { return R"({"model": {)" + model + R"(}, "pre_tokenizer": )" + pre + rest + "}"; }
};

// The error, after checking that it came within a second.
std::string refusal(const std::string& json, const TokenizerOptions& options = {}) {
  const double begin = cpu_seconds();
  const std::string error = error_of([&] { (void)Tokenizer::from_json(json, "dir/tokenizer.json", options); });
  EXPECT_LT(cpu_seconds() - begin, 1.0) << error;
  EXPECT_LT(error.size(), 600u);
  return error;
}
std::string model_refusal(const std::string& model) { return refusal(Parts{.model = model}.json()); }
std::string pre_refusal(const std::string& pre) { return refusal(Parts{.pre = pre}.json()); }
std::string rest_refusal(const std::string& rest) { return refusal(Parts{.rest = rest}.json()); }

TEST(BadTokenizerJson, TheGoodOneIsGood) {
  const Tokenizer tokenizer = Tokenizer::from_json(Parts{}.json(), "t");
  EXPECT_EQ(tokenizer.encode("ab"), std::vector<int>{2});
  EXPECT_TRUE(tokenizer.encode("xyz").empty());  // no such bytes, no U+FFFD either: nothing is left, as in the reference
}

TEST(BadTokenizerJson, Structure) {
  const std::string f = "dir/tokenizer.json: ";
  EXPECT_THAT(refusal(""), StartsWith(f + "not valid JSON"));
  EXPECT_THAT(refusal("{"), StartsWith(f + "not valid JSON"));
  EXPECT_EQ(refusal("[]"), "dir/tokenizer.json: found an array, expected an object");
  EXPECT_EQ(refusal("{}"), f + "the key \"model\" is missing");
  EXPECT_EQ(refusal(R"({"model": 3})"), f + "model: found an integer, expected an object");
  EXPECT_EQ(refusal(R"({"model": null})"), f + "the key \"model\" is missing");
  EXPECT_THAT(refusal(std::string(100000, '[')), StartsWith(f));
  EXPECT_THAT(refusal("{\"model\": \"\xff\xfe\"}"), StartsWith(f + "not valid JSON"));
  EXPECT_EQ(refusal(R"({"model": {"vocab": {"a": 0}, "merges": []}})"), f + "the key \"pre_tokenizer\" is missing");
}

TEST(BadTokenizerJson, Model) {
  const std::string f = "dir/tokenizer.json: model: ";
  EXPECT_EQ(model_refusal(R"("type": "Unigram", "vocab": {}, "merges": [])"), f + "type: found \"Unigram\", expected BPE");
  EXPECT_EQ(model_refusal(R"("type": "BPE", "merges": [])"), f + "the key \"vocab\" is missing");
  EXPECT_EQ(model_refusal(R"("type": "BPE", "vocab": {"a": 0})"), f + "the key \"merges\" is missing");
  EXPECT_EQ(model_refusal(R"("type": "BPE", "vocab": ["a"], "merges": [])"), f + "vocab: found an array, expected an object");
  EXPECT_EQ(model_refusal(R"("type": "BPE", "vocab": {}, "merges": [])"), f + "vocab: found no tokens, expected some");
  EXPECT_THAT(model_refusal(R"("byte_fallback": true, "vocab": {"a": 0}, "merges": [])"), HasSubstr("byte_fallback: found true"));
  EXPECT_THAT(model_refusal(R"("end_of_word_suffix": "</w>", "vocab": {"a": 0}, "merges": [])"), HasSubstr("found \"</w>\""));
  EXPECT_THAT(model_refusal(R"("dropout": 0.1, "vocab": {"a": 0}, "merges": [])"), HasSubstr("dropout: found 0.1, expected none"));
}

TEST(BadTokenizerJson, Ids) {
  const auto vocab = [](const std::string& content) { return model_refusal(R"("merges": [], "vocab": {)" + content + "}"); };
  EXPECT_EQ(vocab(R"("a": -1)"), "dir/tokenizer.json: model: vocab: \"a\": found -1, expected an id from 0 to 2097151");
  EXPECT_THAT(vocab(R"("a": 2097152)"), HasSubstr("found 2097152, expected an id"));
  EXPECT_THAT(vocab(R"("a": 9223372036854775807)"), HasSubstr("found 9223372036854775807"));
  EXPECT_THAT(vocab(R"("a": 18446744073709551615)"), HasSubstr("expected an id"));
  EXPECT_THAT(vocab(R"("a": 1e3)"), HasSubstr("expected an id"));
  EXPECT_THAT(vocab(R"("a": "0")"), HasSubstr("found \"0\", expected an id"));
  EXPECT_THAT(vocab(R"("a": null)"), HasSubstr("found null, expected an id"));
  EXPECT_THAT(vocab(R"("a": 0, "b": 0)"), HasSubstr("found id 0 for both \"a\" and \"b\", expected one token for each id"));
  EXPECT_THAT(vocab(R"("a": 0, "a": 1)"), HasSubstr("found the token \"a\" twice, expected it once"));
  EXPECT_THAT(vocab(R"("": 0)"), HasSubstr("found an empty token with id 0, expected text"));
  std::string empties;
  for (int i = 0; i < 1'000'000; ++i) empties += (i ? ",\"\":" : "\"\":") + std::to_string(i);
  EXPECT_THAT(vocab(empties), HasSubstr("empty token with id 0"));
}

TEST(BadTokenizerJson, Merges) {
  const auto merges = [](const std::string& list) { return model_refusal(R"("vocab": {"a": 0, "b": 1, "ab": 2}, "merges": )" + list); };
  const std::string f = "dir/tokenizer.json: model: merges";
  EXPECT_EQ(merges(R"({"a": "b"})"), f + ": found an object, expected an array");
  EXPECT_EQ(merges(R"(["a b", "a z"])"), f + "[1]: found \"z\", expected a token of the vocabulary");
  EXPECT_EQ(merges(R"(["b a"])"), f + "[0]: found \"ba\", expected a token of the vocabulary");
  EXPECT_EQ(merges(R"(["ab"])"), f + "[0]: found \"ab\", expected two tokens with a space between them");
  EXPECT_THAT(merges(R"(["a b c"])"), HasSubstr("expected two tokens"));
  EXPECT_THAT(merges(R"([" b"])"), HasSubstr("found an empty part"));
  EXPECT_THAT(merges(R"([""])"), HasSubstr("expected two tokens"));
  EXPECT_EQ(merges("[7]"), f + "[0]: found 7, expected two tokens");
  EXPECT_EQ(merges(R"([["a"]])"), f + "[0]: found [\"a\"], expected two tokens");
  EXPECT_THAT(merges(R"([["a", "b", "c"]])"), HasSubstr("expected two tokens"));
  EXPECT_THAT(merges(R"([["a", 1]])"), HasSubstr("expected two tokens"));
}

TEST(BadTokenizerJson, AddedTokens) {
  const auto added = [](const std::string& list) { return rest_refusal(R"(, "added_tokens": )" + list); };
  const std::string f = "dir/tokenizer.json: added_tokens";
  EXPECT_EQ(added("{}"), f + ": found an object, expected an array");
  EXPECT_THAT(added("[3]"), HasSubstr("found an integer, expected an object"));
  EXPECT_THAT(added(R"([{"content": "x"}])"), HasSubstr("\"id\" is missing"));
  EXPECT_THAT(added(R"([{"id": 9}])"), HasSubstr("\"content\" is missing"));
  EXPECT_THAT(added(R"([{"id": -4, "content": "x"}])"), HasSubstr("found id -4, expected 0 to"));
  EXPECT_THAT(added(R"([{"id": 4294967296, "content": "x"}])"), HasSubstr("found id 4294967296"));
  EXPECT_EQ(added(R"([{"id": 0, "content": "x"}])"), f + "[0]: found id 0 for \"x\", expected a free one: it is the id of \"a\"");
  EXPECT_EQ(added(R"([{"id": 7, "content": "a"}])"), f + "[0]: found id 7 for \"a\", which has the id 0 already");
  EXPECT_EQ(added(R"([{"id": 7, "content": ""}])"), f + "[0]: content: found 0 bytes, expected 1 to 1024");
  EXPECT_THAT(added(R"([{"id": 7, "content": ")" + std::string(5000, 'x') + "\"}]"), HasSubstr("found 5000 bytes"));
  EXPECT_EQ(added(R"([{"id": 7, "content": "x", "special": "yes"}])"), f + "[0]: special: found a string, expected a boolean");
}

TEST(BadTokenizerJson, PreTokenizer) {
  const std::string f = "dir/tokenizer.json: pre_tokenizer: ";
  EXPECT_THAT(pre_refusal("3"), HasSubstr("pre_tokenizer: found an integer, expected an object"));
  EXPECT_EQ(pre_refusal(R"({"type": "Metaspace"})"), f + "type: found \"Metaspace\", expected Split, Digits, ByteLevel or Sequence");
  EXPECT_THAT(pre_refusal(R"({"type": "ByteLevel"})"), HasSubstr("add_prefix_space: found true, expected false"));
  EXPECT_THAT(pre_refusal(R"({"type": "Digits"})"), HasSubstr("found no ByteLevel step"));
  EXPECT_THAT(pre_refusal(R"({"type": "Sequence", "pretokenizers": []})"), HasSubstr("found no ByteLevel step"));
  const auto split = [](const std::string& pattern, const std::string& behavior) {
    return pre_refusal(R"({"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": )" + pattern + R"(, "behavior": ")" +
                       behavior + R"("}, {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]})");
  };
  EXPECT_THAT(split(R"({"Regex": "(a"})", "Isolated"), StartsWith(f + "found the pattern \"(a\", expected a valid regular expression"));
  EXPECT_THAT(split(R"({"Regex": ""})", "Isolated"), HasSubstr("found a pattern of 0 bytes"));
  EXPECT_THAT(split(R"({"Glob": "*"})", "Isolated"), HasSubstr("\"String\" is missing"));
  EXPECT_THAT(split(R"({"Regex": "a"})", "MergedWithNext"), HasSubstr("behavior: found \"MergedWithNext\", expected Isolated or Removed"));
  std::string many = R"({"type": "Sequence", "pretokenizers": [)";
  for (int i = 0; i < 1000; ++i) many += R"({"type": "Digits"},)";
  EXPECT_THAT(pre_refusal(many + "{}]}"), HasSubstr("found 1001 steps, expected at most 32"));
  std::string nested;
  for (int i = 0; i < 50; ++i) nested += R"({"type": "Sequence", "pretokenizers": [)";
  EXPECT_NE(pre_refusal(nested), "");
  EXPECT_NE(pre_refusal(R"({"type": "Sequence", "pretokenizers": [{"type": "Sequence", "pretokenizers": []}]})"), "");
}

TEST(BadTokenizerJson, OtherParts) {
  EXPECT_THAT(rest_refusal(R"(, "normalizer": {"type": "Lowercase"})"), HasSubstr("normalizer: type: found \"Lowercase\", expected NFC"));
  EXPECT_THAT(rest_refusal(R"(, "decoder": {"type": "Metaspace"})"), HasSubstr("decoder: type: found \"Metaspace\", expected ByteLevel"));
  EXPECT_THAT(rest_refusal(R"(, "post_processor": {"type": "BertProcessing"})"),
              HasSubstr("post_processor: type: found \"BertProcessing\""));
  const auto processor = [](const std::string& single, const std::string& specials) {
    return rest_refusal(R"(, "post_processor": {"type": "TemplateProcessing", "single": )" + single + R"(, "special_tokens": )" + specials +
                        "}");
  };
  EXPECT_THAT(processor(R"([{"SpecialToken": {"id": "x"}}])", "{}"), HasSubstr("\"x\" is missing"));
  EXPECT_THAT(processor(R"([{"SpecialToken": {"id": "x"}}])", R"({"x": {"ids": [99]}})"), HasSubstr("found id 99, expected 0 to 2"));
  EXPECT_THAT(processor(R"([{"SpecialToken": {"id": "x"}}])", R"({"x": {"ids": []}})"), HasSubstr("found 0 ids, expected one"));
  EXPECT_THAT(processor(R"([{"SpecialToken": {"id": "x"}}, {"SpecialToken": {"id": "x"}}])", R"({"x": {"ids": [0]}})"),
              HasSubstr("several tokens before the text"));
}

TEST(BadTokenizerJson, Configs) {
  const auto config = [](std::string_view text) {
    TokenizerOptions options;
    options.tokenizer_config = text;
    return refusal(Parts{}.json(), options);
  };
  EXPECT_THAT(config("{"), StartsWith("tokenizer_config.json: not valid JSON"));
  EXPECT_EQ(config(R"({"eos_token": "</s>"})"), "tokenizer_config.json: eos_token: found \"</s>\", expected a token of the vocabulary");
  EXPECT_EQ(config(R"({"eos_token": 3})"), "tokenizer_config.json: eos_token: found an integer, expected a string");
  EXPECT_EQ(config(R"({"add_bos_token": "yes"})"), "tokenizer_config.json: add_bos_token: found a string, expected a boolean");
  EXPECT_EQ(config(R"({"chat_template": 3})"), "tokenizer_config.json: chat_template: found an integer, expected an array");
  TokenizerOptions options;
  options.generation_config = R"({"eos_token_id": [0, "x"]})";
  EXPECT_EQ(refusal(Parts{}.json(), options), "generation_config.json: eos_token_id: found a string, expected an integer");
  options.generation_config = R"({"eos_token_id": -2})";
  EXPECT_THAT(refusal(Parts{}.json(), options), HasSubstr("found id -2"));
}

VocabData good_vocab() {
  return {.name = "m.gguf", .model = "gpt2", .pre = "gpt-2", .tokens = {"a", "b", "ab", "<|x|>"}, .types = {1, 1, 1, 3}, .merges = {"a b"}};
}

std::string vocab_refusal(void (*spoil)(VocabData&)) {
  VocabData data = good_vocab();
  spoil(data);
  const double begin = cpu_seconds();
  const std::string error = error_of([&] { (void)Tokenizer::from_vocab(data); });
  EXPECT_LT(cpu_seconds() - begin, 1.0) << error;
  return error;
}

TEST(BadVocab, EachFieldIsNamed) {
  EXPECT_EQ(Tokenizer::from_vocab(good_vocab()).encode("ab"), std::vector<int>{2});
  const std::string f = "m.gguf: tokenizer.ggml.";
  EXPECT_EQ(vocab_refusal([](VocabData& d) { d.model = "llama"; }), f + "model: found \"llama\", expected gpt2 (byte-level BPE)");
  EXPECT_THAT(vocab_refusal([](VocabData& d) { d.pre = "tekken"; }), StartsWith(f + "pre: found \"tekken\", expected one of gpt-2, "));
  EXPECT_EQ(vocab_refusal([](VocabData& d) { d.tokens.clear(); }), f + "tokens: found 0 tokens, expected 1 to 2097152");
  EXPECT_EQ(vocab_refusal([](VocabData& d) { d.types.pop_back(); }), f + "token_type: found 3 entries, expected 4 as of tokens");
  EXPECT_EQ(vocab_refusal([](VocabData& d) { d.types[1] = 0; }), f + "token_type[1]: found 0, expected 1 to 6");
  EXPECT_EQ(vocab_refusal([](VocabData& d) { d.types[1] = -7; }), f + "token_type[1]: found -7, expected 1 to 6");
  EXPECT_EQ(vocab_refusal([](VocabData& d) { d.tokens[2].clear(); }), f + "tokens[2]: found an empty token, expected text");
  EXPECT_EQ(vocab_refusal([](VocabData& d) { d.merges.push_back("a q"); }),
            f + "merges[1]: found \"q\", expected a token of the vocabulary");
  EXPECT_THAT(vocab_refusal([](VocabData& d) { d.merges.push_back("b a"); }), HasSubstr("found \"ba\""));
  EXPECT_THAT(vocab_refusal([](VocabData& d) { d.merges.push_back("ab"); }), HasSubstr("expected two tokens"));
  EXPECT_THAT(vocab_refusal([](VocabData& d) { d.merges.push_back(""); }), HasSubstr("expected two tokens"));
  EXPECT_THAT(vocab_refusal([](VocabData& d) { d.merges.push_back("a "); }), HasSubstr("empty part"));
  EXPECT_EQ(vocab_refusal([](VocabData& d) { d.bos = 4; }), f + "bos_token_id: found 4, expected 0 to 3");
  EXPECT_EQ(vocab_refusal([](VocabData& d) { d.eos = -1; }), f + "eos_token_id: found -1, expected 0 to 3");
  EXPECT_EQ(vocab_refusal([](VocabData& d) { d.eot = 1LL << 40; }), f + "eot_token_id: found 1099511627776, expected 0 to 3");
  EXPECT_EQ(vocab_refusal([](VocabData& d) { d.pad = 4294967295; }), f + "padding_token_id: found 4294967295, expected 0 to 3");
  EXPECT_EQ(vocab_refusal([](VocabData& d) { d.unknown = 77; }), f + "unknown_token_id: found 77, expected 0 to 3");
  EXPECT_THAT(vocab_refusal([](VocabData& d) { d.tokens[3].assign(2000, 'x'); }), HasSubstr("tokens[3]: found 2000 bytes"));
}

TEST(BadVocab, ByteTokens) {
  for (const char* text : {"<0x-1>", "<0x1>", "<0x100>", "<0xGG>", "<0x 1>", "<0x00", "0x00>", "<0x+1>", "x"}) {
    VocabData data = good_vocab();
    data.tokens[1] = text;
    data.types[1] = 6;
    data.merges.clear();
    EXPECT_EQ(error_of([&] { (void)Tokenizer::from_vocab(data); }),
              fmt::format("m.gguf: tokenizer.ggml.tokens[1]: found the byte token \"{}\", expected <0x00> to <0xFF>", text));
  }
}

TEST(BadVocab, ManyTokens) {
  EXPECT_THAT(vocab_refusal([](VocabData& d) {
                d.types.clear();
                d.tokens.assign(1'000'000, "");
              }),
              HasSubstr("tokens[0]: found an empty token"));
  EXPECT_THAT(vocab_refusal([](VocabData& d) {
                d.types.clear();
                d.tokens.assign(3'000'000, "");
              }),
              HasSubstr("found 3000000 tokens, expected 1 to 2097152"));
}

TEST(BadVocab, RepeatedAndStrangeTokensAreHarmless) {
  VocabData data = good_vocab();
  data.tokens = {"a", "a", "\xff\xfe", "日", "b", "ab", std::string("\0", 1), "[PAD7]"};
  data.types = {1, 1, 1, 1, 1, 1, 1, 5};
  const Tokenizer tokenizer = Tokenizer::from_vocab(data);
  EXPECT_EQ(tokenizer.encode("ab[PAD7]"), (std::vector<int>{5}));
  EXPECT_EQ(tokenizer.decode(std::vector<int>{1, 2, 3, 6}), std::string("a\uFFFD\uFFFD日\0", 11));
}

TEST(Vocab, UnknownPreTokenizerCannotBeWritten) {
  const std::string pre = R"({"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": "[ab]"}, "behavior": "Isolated"},
      {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]})";
  const Tokenizer tokenizer = Tokenizer::from_json(Parts{.pre = pre}.json(), "t.json");
  EXPECT_EQ(tokenizer.encode("ab"), (std::vector<int>{0, 1}));
  EXPECT_THAT(error_of([&] { (void)tokenizer.vocab(); }), StartsWith("t.json: found a pre-tokenizer"));
}

}  // namespace
}  // namespace cachalot::test
