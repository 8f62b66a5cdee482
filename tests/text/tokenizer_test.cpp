// Encoding and decoding by tokenizers: special tokens, BOS, end tokens, digits and scripts, any bytes, long runs.
#include "text/tokenizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "support/support.h"
#include "text/detokenizer.h"
#include "text/tokenizer_support.h"
#include "text/unicode.h"

namespace cachalot::test {
namespace {

using Ids = std::vector<int>;

struct ScriptCase {
  const char* text;
  Ids ids;
};
struct ScriptTable {
  const char* tokenizer;
  std::vector<ScriptCase> cases;
};

// Ids from the reference library (tokenizers 0.23.3, add_special_tokens=False).
const std::vector<ScriptTable>& script_tables() {
  static const std::vector<ScriptTable> tables = {
      {"deepseek-v3",
       {
           {"501", {19097}},
           {"1234567", {6895, 18009, 25}},
           {"rfid501.go", {35305, 329, 19097, 68082}},
           {"3.14", {21, 16, 929}},
           {"１２３４", {127167, 25081, 33095}},
           {"中文123", {21134, 6895}},
           {"ひらがなカタカナ", {40259, 4970, 2936, 2942, 15961, 11767, 15961, 27071}},
           {"한국어 텍스트", {5634, 17564, 9227, 61291, 238, 45652}},
           {"Führer Fu\u0308hrer", {40, 2134, 42243, 30618, 66383, 42243}},
           {"a\tb\t\tc", {67, 37496, 200, 28544}},
           {"a\r\nb\r\n", {67, 204, 201, 68, 204, 201}},
           {"How are you doing?", {4117, 477, 440, 4843, 33}},
           {" lead", {2070}},
           {"trail ", {19660, 321, 223}},
           {"two  spaces", {23315, 223, 13564}},
           {"def f(x):\n    return x + 1\n", {3465, 285, 4042, 3395, 361, 1354, 1527, 940, 223, 19, 201}},
           {"x\u00a0y", {90, 2162, 91}},
       }},
      {"deepseek-llm",
       {
           {"501", {20, 15, 16}},
           {"1234567", {16, 17, 18, 19, 20, 21, 22}},
           {"rfid501.go", {17198, 305, 20, 15, 16, 13, 2304}},
           {"3.14", {18, 13, 16, 19}},
           {"１２３４", {948, 226, 948, 227, 948, 228, 948, 229}},
           {"中文123", {43757, 16, 17, 18}},
           {"ひらがなカタカナ", {7217, 110, 9156, 218, 67118, 73138, 9156, 104, 93491, 9156, 104, 8550, 219}},
           {"한국어 텍스트", {76152, 91765, 242, 94627, 112, 207, 167, 214, 222, 80729, 97, 167, 219, 116}},
           {"Führer Fu\u0308hrer", {37, 100014, 71, 6245, 39088, 134, 217, 71, 6245}},
           {"a\tb\t\tc", {64, 38870, 184, 22989}},
           {"a\r\nb\r\n", {64, 188, 185, 65, 188, 185}},
           {"How are you doing?", {2819, 418, 340, 3217, 30}},
           {" lead", {2023}},
           {"trail ", {75856, 207}},
           {"two  spaces", {9498, 207, 9577}},
           {"def f(x):\n    return x + 1\n", {1558, 267, 7, 87, 1780, 185, 300, 972, 1376, 919, 207, 16, 185}},
           {"x\u00a0y", {87, 1202, 88}},
       }},
      {"qwen3",
       {
           {"501", {20, 15, 16}},
           {"1234567", {16, 17, 18, 19, 20, 21, 22}},
           {"rfid501.go", {8052, 307, 20, 15, 16, 18002}},
           {"3.14", {18, 13, 16, 19}},
           {"１２３４", {20109, 24918, 33517, 45602}},
           {"中文123", {104811, 16, 17, 18}},
           {"ひらがなカタカナ", {124877, 32403, 28195, 25770, 70393, 46207, 70393, 95352}},
           {"한국어 텍스트", {23573, 124785, 31079, 10764, 44104, 53189}},
           {"Führer Fu\u0308hrer", {37, 50753, 261, 434, 50753, 261}},
           {"a\tb\t\tc", {64, 2233, 197, 1444}},
           {"a\r\nb\r\n", {64, 319, 65, 319}},
           {"How are you doing?", {4340, 525, 498, 3730, 30}},
           {" lead", {2990}},
           {"trail ", {77875, 220}},
           {"two  spaces", {19789, 220, 12621}},
           {"def f(x):\n    return x + 1\n", {750, 282, 2075, 982, 262, 470, 856, 488, 220, 16, 198}},
           {"x\u00a0y", {87, 4102, 88}},
       }},
      {"gpt2",
       {
           {"501", {33548}},
           {"1234567", {10163, 2231, 3134}},
           {"rfid501.go", {41871, 312, 33548, 13, 2188}},
           {"3.14", {18, 13, 1415}},
           {"１２３４", {171, 120, 239, 171, 120, 240, 171, 120, 241, 171, 120, 242}},
           {"中文123", {40792, 23877, 229, 10163}},
           {"ひらがなカタカナ", {2515, 110, 36853, 35585, 26945, 21763, 23376, 21763, 26229}},
           {"한국어 텍스트", {47991, 250, 166, 113, 255, 168, 244, 112, 220, 169, 227, 235, 168, 232, 97, 169, 232, 116}},
           {"Führer Fu\u0308hrer", {37, 9116, 71, 11751, 13333, 136, 230, 71, 11751}},
           {"a\tb\t\tc", {64, 197, 65, 197, 197, 66}},
           {"a\r\nb\r\n", {64, 201, 198, 65, 201, 198}},
           {"How are you doing?", {2437, 389, 345, 1804, 30}},
           {" lead", {1085}},
           {"trail ", {9535, 346, 220}},
           {"two  spaces", {11545, 220, 9029}},
           {"def f(x):\n    return x + 1\n", {4299, 277, 7, 87, 2599, 198, 220, 220, 220, 1441, 2124, 1343, 352, 198}},
           {"x\u00a0y", {87, 1849, 88}},
       }},
  };
  return tables;
}

TEST(Tokenizer, DigitsScriptsAndSpacesAsTheReference) {
  for (const auto& [name, cases] : script_tables()) {
    const Tokenizer tokenizer = load_tokenizer(name);
    for (const auto& [text, ids] : cases) EXPECT_EQ(tokenizer.encode(text), ids) << name << ": " << text;
  }
  EXPECT_EQ(load_tokenizer("deepseek-v3").encode("501").size(), 1u);
  EXPECT_EQ(load_tokenizer("deepseek-llm").encode("501").size(), 3u);
}

TEST(Tokenizer, RoundTripKeepsEverySpace) {
  const Tokenizer tokenizer = load_tiny_v2();
  for (const std::string text :
       {"How are you doing?", "  two  leading", "trailing  ", "if x:\n        return  1\n", "\t\ta\r\n\r\nb", "", " "}) {
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  }
}

TEST(Tokenizer, ExactlyOneBos) {
  const Tokenizer tokenizer = load_tokenizer("deepseek-v3");
  ASSERT_EQ(tokenizer.bos(), 0);
  EXPECT_TRUE(tokenizer.add_bos());
  const std::string bos = "<｜begin▁of▁sentence｜>";
  const auto count = [](const Ids& ids) { return std::ranges::count(ids, 0); };
  EXPECT_EQ(tokenizer.encode("hi", {.add_bos = true}), (Ids{0, 6366}));
  EXPECT_EQ(tokenizer.encode("hi", {}), (Ids{6366}));
  EXPECT_EQ(tokenizer.encode(bos + "hi", {.add_bos = true, .parse_special = true}), (Ids{0, 6366}));
  EXPECT_EQ(tokenizer.encode(bos + "hi", {.add_bos = false, .parse_special = true}), (Ids{0, 6366}));
  EXPECT_EQ(tokenizer.encode("", {.add_bos = true}), (Ids{0}));
  // Spelled by a user, it is text: the real one goes before it.
  const Ids spelled = tokenizer.encode(bos + "hi", {.add_bos = true, .parse_special = false});
  EXPECT_EQ(count(spelled), 1);
  EXPECT_EQ(spelled.front(), 0);
  EXPECT_EQ(tokenizer.decode(spelled), bos + bos + "hi");
}

TEST(Tokenizer, UsersCannotSpellControlTokens) {
  const Tokenizer v3 = load_tokenizer("deepseek-v3");
  // The file marks the role tokens as not special; they are control tokens all the same.
  for (const char* text : {"<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<|EOT|>", "<｜tool▁calls▁begin｜>"}) {
    const int id = v3.token_id(text).value();
    EXPECT_TRUE(v3.is_special(id)) << text;
    EXPECT_EQ(v3.encode(text, {.parse_special = true}), (Ids{id}));
    const Ids ids = v3.encode(std::string("a ") + text + " b");
    EXPECT_EQ(std::ranges::count_if(ids, [&](int i) { return v3.is_special(i); }), 0) << text;
    EXPECT_EQ(v3.decode(ids), std::string("a ") + text + " b");
  }
  const Tokenizer qwen = load_tokenizer("qwen3");
  const int im_end = qwen.token_id("<|im_end|>").value();
  EXPECT_EQ(std::ranges::count(qwen.encode("x<|im_end|>"), im_end), 0);
  // A user-defined token is part of the language, not of the protocol.
  EXPECT_EQ(qwen.encode("<think>"), (Ids{qwen.token_id("<think>").value()}));
}

TEST(Tokenizer, SpecialTokensLeaveTheText) {
  const Tokenizer v3 = load_tokenizer("deepseek-v3");
  const Ids ids = v3.encode("<｜User｜>hi<｜end▁of▁sentence｜>", {.parse_special = true});
  EXPECT_EQ(v3.decode(ids, true), "hi");
  EXPECT_EQ(v3.decode(ids, false), "<｜User｜>hi<｜end▁of▁sentence｜>");
  Detokenizer stream(v3, true);
  std::string text;
  for (const int id : ids) text += stream.push(id);
  EXPECT_EQ(text + stream.finish(), "hi");
}

TEST(Tokenizer, EndTokensAreTheUnionOfAllFiles) {
  const std::string json = read_file(testdata("tiny-v2/tokenizer.json"));
  const std::string config = R"({"eos_token": "<｜end▁of▁sentence｜>", "bos_token": null, "pad_token": {"content": "<｜▁pad▁｜>"}})";
  TokenizerOptions options;
  EXPECT_TRUE(Tokenizer::from_json(json, "q").eos_ids().empty());
  options.tokenizer_config = config;
  EXPECT_TRUE(std::ranges::equal(Tokenizer::from_json(json, "q", options).eos_ids(), Ids{1}));
  options.generation_config = R"({"eos_token_id": [1, 16]})";
  options.eos_ids = {4};
  const Tokenizer tokenizer = Tokenizer::from_json(json, "q", options);
  EXPECT_TRUE(std::ranges::equal(tokenizer.eos_ids(), Ids{1, 4, 16}));
  EXPECT_EQ(tokenizer.eos(), 1);
  EXPECT_EQ(tokenizer.pad(), 2);
  EXPECT_EQ(tokenizer.bos(), std::nullopt);
  EXPECT_TRUE(tokenizer.is_eos(16));
  EXPECT_FALSE(tokenizer.is_eos(2));
  // Without BOS there is none to add.
  EXPECT_EQ(tokenizer.encode("hi", {.add_bos = true}), tokenizer.encode("hi"));
  options = {.generation_config = R"({"eos_token_id": 16})"};
  EXPECT_EQ(Tokenizer::from_json(json, "q", options).eos(), 16);
  // Through GGUF's fields the set stays whole.
  EXPECT_TRUE(std::ranges::equal(Tokenizer::from_vocab(tokenizer.vocab()).eos_ids(), tokenizer.eos_ids()));
}

TEST(Tokenizer, BosFromTheTemplateProcessor) {
  const std::string processor = R"("post_processor": {"type": "Sequence", "processors": [{"type": "ByteLevel"},
      {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
       "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [256], "tokens": ["<|end|>"]}}}]},)";
  const std::string json = small_tokenizer_json({}, processor);
  const Tokenizer tokenizer = Tokenizer::from_json(json, "t");
  EXPECT_EQ(tokenizer.bos(), 256);
  EXPECT_TRUE(tokenizer.add_bos());
  TokenizerOptions options;
  options.tokenizer_config = R"({"add_bos_token": false, "bos_token": "<|end|>"})";
  EXPECT_FALSE(Tokenizer::from_json(json, "t", options).add_bos());
  options.add_bos = true;
  EXPECT_TRUE(Tokenizer::from_json(json, "t", options).add_bos());
}

TEST(Tokenizer, ChatTemplateForms) {
  const std::string json = small_tokenizer_json({});
  const auto chosen = [&json](std::string_view config, std::string_view file = "") {
    TokenizerOptions options;
    options.tokenizer_config = config;
    options.chat_template = file;
    return Tokenizer::from_json(json, "t", options).chat_template();
  };
  EXPECT_EQ(chosen(R"({"chat_template": "A"})"), "A");
  EXPECT_EQ(chosen(R"({"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]})"), "D");
  EXPECT_EQ(chosen(R"({"chat_template": [{"name": "rag", "template": "R"}]})"), "R");
  EXPECT_EQ(chosen(R"({"chat_template": "A"})", "FILE"), "FILE");
  EXPECT_EQ(chosen(R"({"model_max_length": 1000000000000000019884624838656})"), "");
}

TEST(Tokenizer, MergesByRankLeftmostFirst) {
  // "aab": rank 0 is "a b", so the left a stays alone though "a a" is a merge too.
  const Tokenizer tokenizer = Tokenizer::from_json(small_tokenizer_json({"a b", "a a", "aa a"}), "t");
  EXPECT_EQ(tokenizer.encode("aab"), (Ids{'a', 256}));
  EXPECT_EQ(tokenizer.encode("aaa"), (Ids{258}));
  EXPECT_EQ(tokenizer.encode("aaaa"), (Ids{257, 257}));
  // The long path takes the same decisions: runs of a, in pairs from the left.
  for (const size_t n : {47, 48, 49, 200, 201}) {
    Ids expected(n / 2, 257);
    if (n % 2 == 1) expected.back() = 258;
    EXPECT_EQ(tokenizer.encode(std::string(n, 'a')), expected) << n;
  }
}

TEST(Tokenizer, ShortAndLongMergesAgree) {
  // Words of every length over two letters, with merges of many shapes: the scan and the heap against a plain loop.
  const std::vector<std::string> merges = {"b a", "a b", "a a", "ab a", "b b", "aa b", "ba ba", "ab ab", "bb aa", "aba b"};
  const Tokenizer tokenizer = Tokenizer::from_json(small_tokenizer_json(merges), "t");
  const auto naive = [&merges](const std::string& word) {
    std::vector<std::string> parts;
    for (const char c : word) parts.emplace_back(1, c);
    for (;;) {
      size_t best = merges.size(), at = 0;
      for (size_t i = 0; i + 1 < parts.size(); ++i) {
        const auto rank = static_cast<size_t>(std::ranges::find(merges, parts[i] + " " + parts[i + 1]) - merges.begin());
        if (rank < best) best = rank, at = i;
      }
      if (best == merges.size()) return parts;
      parts[at] += parts[at + 1];
      parts.erase(parts.begin() + static_cast<ptrdiff_t>(at) + 1);
    }
  };
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    std::string word(1 + random() % 120, 'a');
    for (char& c : word) c = random() % 2 ? 'a' : 'b';
    std::vector<std::string> parts;
    for (const int id : tokenizer.encode(word)) parts.emplace_back(tokenizer.piece(id));
    ASSERT_EQ(parts, naive(word)) << word;
  }
}

TEST(Tokenizer, AnyBytesSurvive) {
  const Tokenizer tokenizer = load_tiny_v2();
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all += static_cast<char>(byte);
  const std::string nul("a\0b\0\0", 5);
  for (const std::string& text : {all, nul, std::string("\xff\xfe"), std::string("\xe4\xb8"),
                                  std::string("中\xe4"
                                              "文"),
                                  std::string("\xed\xa0\x80")}) {
    EXPECT_EQ(tokenizer.decode_bytes(tokenizer.encode(text)), text) << unicode::replace_invalid(text);
  }
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("a\xff"
                                              "b")),
            "a\uFFFDb");
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    std::string text(random() % 60, ' ');
    for (char& c : text) c = static_cast<char>(random());
    ASSERT_EQ(tokenizer.decode_bytes(tokenizer.encode(text)), text);
  }
}

TEST(Tokenizer, BytesWithoutAToken) {
  // No token for 0xFF in the vocabulary, but an added token that stands for it: as DeepSeek's files do.
  std::string json = small_tokenizer_json({});
  const std::string own = R"("ÿ":255)";
  ASSERT_NE(json.find(own), std::string::npos);
  json.replace(json.find(own), own.size(), R"("ab":255)");
  std::string added = json;
  const std::string list = R"("added_tokens": [)";
  added.insert(added.find(list) + list.size(), R"({"id": 300, "content": "ÿ", "special": false}, )");
  EXPECT_EQ(Tokenizer::from_json(added, "t").encode("\xff"), (Ids{300}));
  // With none at all U+FFFD takes its place.
  const Tokenizer tokenizer = Tokenizer::from_json(json, "t");
  EXPECT_EQ(tokenizer.encode("a\xff"), (Ids{'a', 0xEF, 0xBF, 0xBD}));
}

TEST(Tokenizer, AddedTokensStripAndStandAlone) {
  std::string json = small_tokenizer_json({});
  const std::string list = R"("added_tokens": [)";
  json.insert(json.find(list) + list.size(),
              R"({"id": 300, "content": "<l>", "lstrip": true}, {"id": 301, "content": "<r>", "rstrip": true},
      {"id": 302, "content": "word", "single_word": true}, {"id": 303, "content": "<long"}, {"id": 304, "content": "<longer>"},)");
  const Tokenizer tokenizer = Tokenizer::from_json(json, "t");
  EXPECT_EQ(tokenizer.encode("a \t<l> b"), (Ids{'a', 300, ' ', 'b'}));
  EXPECT_EQ(tokenizer.encode("a <r>\u3000 b"), (Ids{'a', ' ', 301, 'b'}));
  EXPECT_EQ(tokenizer.encode("word"), (Ids{302}));
  EXPECT_EQ(tokenizer.encode("xword,word"), (Ids{'x', 'w', 'o', 'r', 'd', ',', 302}));
  EXPECT_EQ(tokenizer.encode("word_"), (Ids{'w', 'o', 'r', 'd', '_'}));
  EXPECT_EQ(tokenizer.encode("<longer>"), (Ids{304}));
  EXPECT_EQ(tokenizer.encode("<longe"), (Ids{303, 'e'}));
}

TEST(Tokenizer, IgnoreMergesTakesWholePieces) {
  const auto ids = [](const char* flag) {
    std::string json = small_tokenizer_json({"a b", "b c", "ab c"});
    const std::string model = R"("type": "BPE",)";
    json.insert(json.find(model) + model.size(), flag);
    // "bcd" is a token that no merge leads to.
    const std::string own = R"("abc":258)";
    json.insert(json.find(own) + own.size(), R"(,"bcd":300)");
    return Tokenizer::from_json(json, "t").encode("bcd");
  };
  EXPECT_EQ(ids(R"("ignore_merges": true,)"), (Ids{300}));
  EXPECT_EQ(ids(R"("ignore_merges": false,)"), (Ids{257, 'd'}));
}

TEST(Tokenizer, LookUp) {
  const Tokenizer tokenizer = load_tokenizer("gpt2");
  EXPECT_EQ(tokenizer.size(), 50257);
  EXPECT_EQ(tokenizer.piece(262), " the");
  EXPECT_EQ(tokenizer.token_text(262), "Ġthe");
  EXPECT_EQ(tokenizer.token_id("Ġthe"), 262);
  EXPECT_EQ(tokenizer.token_id(" the"), std::nullopt);
  EXPECT_EQ(tokenizer.kind(50256), TokenKind::kControl);
  for (const int id : {-1, 50257, 1 << 30}) {
    EXPECT_EQ(tokenizer.piece(id), "");
    EXPECT_EQ(tokenizer.kind(id), TokenKind::kUnused);
    EXPECT_FALSE(tokenizer.is_special(id));
  }
  EXPECT_EQ(tokenizer.decode(Ids{-5, 262, 99999999}), " the");
}

TEST(Tokenizer, VocabForGguf) {
  const Tokenizer tokenizer = load_tokenizer("qwen3");
  const VocabData data = tokenizer.vocab(151936);
  EXPECT_EQ(data.model, "gpt2");
  ASSERT_EQ(data.tokens.size(), 151936u);
  EXPECT_EQ(data.tokens[151935], "[PAD151935]");
  EXPECT_EQ(data.types[151935], 5);
  EXPECT_EQ(data.types[0], 1);
  EXPECT_EQ(data.types[static_cast<size_t>(tokenizer.token_id("<|im_end|>").value())], 3);
  EXPECT_EQ(data.types[static_cast<size_t>(tokenizer.token_id("<think>").value())], 4);
  EXPECT_EQ(data.merges.at(0), "Ġ Ġ");
  EXPECT_EQ(data.merges.size(), 151387u);
  EXPECT_FALSE(data.chat_template.empty());
  EXPECT_EQ(Tokenizer::from_vocab(data).size(), 151936);
}

TEST(Tokenizer, ExplicitBosAndPreNamesOfGguf) {
  VocabData data = load_tiny_v2().vocab();
  data.add_bos.reset();
  EXPECT_FALSE(Tokenizer::from_vocab(data).add_bos());
  data.pre = "llama-bpe";
  EXPECT_TRUE(Tokenizer::from_vocab(data).add_bos());
  for (const char* pre : {"gpt-2", "default", "", "smollm", "qwen2", "deepseek-r1-qwen", "deepseek-llm", "deepseek-coder", "deepseek-v3"}) {
    data.pre = pre;
    EXPECT_EQ(Tokenizer::from_vocab(data).decode(Tokenizer::from_vocab(data).encode("Grüße 123!")), "Grüße 123!") << pre;
  }
  // NFC belongs to Qwen's own files; the distilled models' tokenizer has none.
  const std::string decomposed = "u\u0308";
  data.pre = "qwen2";
  EXPECT_EQ(Tokenizer::from_vocab(data).decode(Tokenizer::from_vocab(data).encode(decomposed)), "ü");
  data.pre = "deepseek-r1-qwen";
  EXPECT_EQ(Tokenizer::from_vocab(data).decode(Tokenizer::from_vocab(data).encode(decomposed)), decomposed);
}

TEST(Tokenizer, ByteTokensOfGguf) {
  VocabData data = load_tiny_v2().vocab();
  data.tokens.push_back("<0xE4>");
  data.types.push_back(6);
  const Tokenizer tokenizer = Tokenizer::from_vocab(data);
  EXPECT_EQ(tokenizer.piece(tokenizer.size() - 1), "\xE4");
}

// The bound is loose for slow machines and sanitizers; a quadratic step would take minutes.
TEST(Tokenizer, LongRunsAreLinear) {
  constexpr size_t kRun = 131072;
  for (const char* name : {"deepseek-v3", "deepseek-llm", "qwen3", "gpt2"}) {
    const Tokenizer tokenizer = load_tokenizer(name);
    for (const std::string unit : {"a", " ", "1", ".", "\n", "中", "\u0301", "\u3000", "\xff", "<", "ab", " \n", " .", "'", "é"}) {
      std::string text;
      while (text.size() < kRun * unit.size()) text += unit;
      const double begin = cpu_seconds();
      const Ids ids = tokenizer.encode(text + "x");
      EXPECT_LT(cpu_seconds() - begin, 4.0) << name << ": " << unit;
      EXPECT_EQ(tokenizer.decode_bytes(ids), text + "x");
    }
  }
}

TEST(Tokenizer, TenMegabytesOfMixedText) {
  const Tokenizer tokenizer = load_tokenizer("deepseek-v3");
  std::string text;
  const std::string paths[] = {"text/wiki/eval.txt", "text/zh/eval.txt", "text/code/eval.txt", "text/legal_de/eval.txt"};
  while (text.size() < 10'000'000)
    for (const std::string& path : paths) text += read_file(testdata(path));
  const double begin = cpu_seconds();
  const Ids ids = tokenizer.encode(text);
  EXPECT_LT(cpu_seconds() - begin, 20.0);
  // Not a round trip: ü and the like are taken for the raw bytes 0xFC..., as in the reference.
  EXPECT_LT(ids.size(), text.size() / 2);
  EXPECT_GT(ids.size(), text.size() / 10);
}

}  // namespace
}  // namespace cachalot::test
