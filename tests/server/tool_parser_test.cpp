// Tool calls of each family, fed in every cut: the joined deltas never depend on it.
#include "server/tool_parser.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "support/support.h"

namespace cachalot::server {
namespace {

struct Case {
  const char* name;
  ToolFormat format;
  std::string text;
  std::string content;
  std::vector<std::pair<std::string, std::string>> calls;  // name, arguments
};

const std::vector<Case>& cases() {
  using F = ToolFormat;
  static const std::vector<Case> all = {
      {"v3",
       F::deepseek_v3,
       "Let me look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"place\": "
       "\"北京\"}\n```<｜tool▁call▁end｜>\n"
       "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
       "Let me look.",
       {{"get_weather", "{\"place\": \"北京\"}"}, {"now", "{}"}}},
      {"v3 without fence",
       F::deepseek_v3,
       "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{\"a\": [1, 2]}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
       "",
       {{"f", "{\"a\": [1, 2]}"}}},
      {"v3 cut short",
       F::deepseek_v3,
       "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": \"xy",
       "",
       {{"f", "{\"a\": \"xy"}}},
      {"v3.1",
       F::deepseek_v31,
       "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{\"q\": \"日本語 \\\"x\\\"\", \"n\": 3}<｜tool▁call▁end｜>"
       "<｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>",
       "",
       {{"search", "{\"q\": \"日本語 \\\"x\\\"\", \"n\": 3}"}, {"now", "{}"}}},
      {"v3.1 end before the separator",
       F::deepseek_v31,
       "a<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁call▁end｜><｜tool▁calls▁end｜>b",
       "ab",
       {{"now", "{}"}}},
      {"v3.2",
       F::deepseek_v32,
       "Sure.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"get\">\n<｜DSML｜parameter name=\"place\" string=\"true\">a "
       "\"b\"\nc</｜DSML｜parameter>\n"
       "<｜DSML｜parameter name=\"n\" string=\"false\">[1, {\"x\": null}]</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke "
       "name=\"now\">\n"
       "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
       "Sure.",
       {{"get", "{\"place\": \"a \\\"b\\\"\\nc\", \"n\": [1, {\"x\": null}]}"}, {"now", "{}"}}},
      {"v3.2 with a value that is no JSON",
       F::deepseek_v32,
       "<｜DSML｜function_calls><｜DSML｜invoke name=\"f\"><｜DSML｜parameter name=\"p\" string=\"false\">not "
       "json</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
       "",
       {{"f", "{\"p\": \"not json\"}"}}},
      {"hermes",
       F::hermes,
       "Hm.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"s\": \"}\\\"{\", \"o\": {\"a\": "
       "[true]}}}\n</tool_call>\n<tool_call>\n{\"arguments\": {\"x\": 1}, \"name\": "
       "\"g\"}\n</tool_call>",
       "Hm.",
       {{"f", "{\"s\": \"}\\\"{\", \"o\": {\"a\": [true]}}"}, {"g", "{\"x\": 1}"}}},
      {"hermes without a call inside", F::hermes, "a <tool_call>nothing</tool_call> b", "a <tool_call>nothing</tool_call> b", {}},
      {"hermes, no arguments", F::hermes, "<tool_call>{\"name\": \"f\"}</tool_call>", "", {{"f", "{}"}}},
      {"llama", F::llama3, "{\"name\": \"f\", \"parameters\": {\"a\": \"b c\"}}", "", {{"f", "{\"a\": \"b c\"}"}}},
      {"llama, tag and two",
       F::llama3,
       "<|python_tag|>{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"g\", \"parameters\": {\"a\": 1}}",
       "",
       {{"f", "{}"}, {"g", "{\"a\": 1}"}}},
      {"llama, an answer in JSON", F::llama3, "{\"name\": \"Bob\", \"age\": 3}", "{\"name\": \"Bob\", \"age\": 3}", {}},
      {"llama, text", F::llama3, "Just { text.", "Just { text.", {}},
      {"no call", F::deepseek_v31, "1 < 2 and <｜tool▁ but no more", "1 < 2 and <｜tool▁ but no more", {}},
  };
  return all;
}

struct Result {
  std::string content;
  std::vector<std::pair<std::string, std::string>> calls;
  std::vector<std::string> ids;
  size_t deltas_with_arguments = 0;

  void add(const Delta& delta) {
    content += delta.content;
    for (const ToolCallDelta& call : delta.calls) {
      if (static_cast<size_t>(call.index) == calls.size()) {
        EXPECT_FALSE(call.id.empty());
        calls.emplace_back(call.name, "");
        ids.push_back(call.id);
      } else {
        EXPECT_TRUE(call.id.empty() && call.name.empty()) << "id and name come once";
      }
      ASSERT_LT(static_cast<size_t>(call.index), calls.size());
      calls[static_cast<size_t>(call.index)].second += call.arguments;
      deltas_with_arguments += call.arguments.empty() ? 0 : 1;
    }
  }
};

Result parse(const Case& c, const std::vector<std::string>& pieces) {
  const auto parser = make_tool_parser(c.format);
  Result result;
  for (const std::string& piece : pieces) {
    Delta delta;
    parser->push(piece, delta);
    result.add(delta);
  }
  Delta last;
  parser->finish(last);
  result.add(last);
  return result;
}

TEST(ToolParser, GivesTheSameForEveryCutInTwoAndInBytes) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    std::vector<std::vector<std::string>> cuts;
    for (size_t at = 0; at <= c.text.size(); ++at) cuts.push_back({c.text.substr(0, at), c.text.substr(at)});
    std::vector<std::string> bytes;
    for (const char ch : c.text) bytes.emplace_back(1, ch);
    cuts.push_back(bytes);
    for (const auto& cut : cuts) {
      const Result result = parse(c, cut);
      ASSERT_EQ(result.content, c.content) << "cut after " << cut[0].size();
      ASSERT_EQ(result.calls, c.calls) << "cut after " << cut[0].size();
    }
  }
}

TEST(ToolParser, StreamsArgumentsBeforeTheCallIsComplete) {
  for (const Case& c : cases()) {
    if (c.calls.empty() || c.calls[0].second.size() < 8) continue;
    SCOPED_TRACE(c.name);
    std::vector<std::string> bytes;
    for (const char ch : c.text) bytes.emplace_back(1, ch);
    EXPECT_GT(parse(c, bytes).deltas_with_arguments, 1u);
  }
}

TEST(ToolParser, ReadsCallsAsTheyAreWrittenForHistory) {
  const auto arguments = nlohmann::ordered_json::parse(R"({"place":"Rome","days":[1,2]})");
  for (const ToolFormat format :
       {ToolFormat::deepseek_v3, ToolFormat::deepseek_v31, ToolFormat::deepseek_v32, ToolFormat::hermes, ToolFormat::llama3}) {
    SCOPED_TRACE(name_of(format));
    const Result result = parse({.format = format}, {tool_call_text(format, "get_weather", arguments)});
    ASSERT_EQ(result.calls.size(), 1u);
    EXPECT_EQ(result.calls[0].first, "get_weather");
    EXPECT_EQ(nlohmann::ordered_json::parse(result.calls[0].second), arguments);
  }
}

TEST(ToolParser, IdsAreUnique) {
  const Result a = parse(cases()[0], {cases()[0].text}), b = parse(cases()[0], {cases()[0].text});
  EXPECT_NE(a.ids[0], a.ids[1]);
  EXPECT_NE(a.ids[0], b.ids[0]);
}

TEST(ToolParser, HostileTextNeverFails) {
  const std::string tags[] = {"<｜tool▁calls▁begin｜>",
                              "<｜tool▁call▁begin｜>",
                              "<｜tool▁sep｜>",
                              "<｜tool▁call▁end｜>",
                              "<｜tool▁calls▁end｜>",
                              "```json\n",
                              "\n```",
                              "<｜DSML｜function_calls>",
                              "<｜DSML｜invoke name=\"",
                              "\">",
                              "<｜DSML｜parameter name=\"x\" string=\"false\">",
                              "</｜DSML｜parameter>",
                              "</｜DSML｜invoke>",
                              "</｜DSML｜function_calls>",
                              "<tool_call>",
                              "</tool_call>",
                              "{\"name\"",
                              ": \"f\", ",
                              "\"arguments\": {",
                              "}",
                              "\\",
                              "\"",
                              "<"};
  std::mt19937 random(7);
  for (int round = 0; round < 3000; ++round) {
    for (const ToolFormat format :
         {ToolFormat::deepseek_v3, ToolFormat::deepseek_v31, ToolFormat::deepseek_v32, ToolFormat::hermes, ToolFormat::llama3}) {
      Case c{"random", format, {}, {}, {}};
      std::vector<std::string> pieces;
      for (unsigned i = 0; i < 8; ++i) pieces.push_back(tags[random() % std::size(tags)]);
      parse(c, pieces);
    }
  }
}

TEST(ToolFormat, IsReadFromTheTemplate) {
  const std::pair<const char*, ToolFormat> expected[] = {{"deepseek-ai-DeepSeek-V3", ToolFormat::deepseek_v3},
                                                         {"deepseek-ai-DeepSeek-V3.1", ToolFormat::deepseek_v31},
                                                         {"deepseek-ai-DeepSeek-V3.2", ToolFormat::deepseek_v32},
                                                         {"llama-cpp-deepseek-r1", ToolFormat::deepseek_v3},
                                                         {"Qwen-Qwen3-0.6B", ToolFormat::hermes},
                                                         {"Qwen-Qwen2.5-7B-Instruct", ToolFormat::hermes},
                                                         {"meta-llama-Llama-3.1-8B-Instruct", ToolFormat::llama3},
                                                         {"deepseek-ai-DeepSeek-V2", ToolFormat::none}};
  for (const auto& [name, format] : expected) {
    std::ifstream in(test::source_file(std::string("testdata/templates/") + name + ".jinja"));
    std::ostringstream text;
    text << in.rdbuf();
    ASSERT_FALSE(text.str().empty()) << name;
    EXPECT_EQ(tool_format_of(text.str()), format) << name;
    EXPECT_EQ(tool_format_named(name_of(format)), format);
  }
}

}  // namespace
}  // namespace cachalot::server
