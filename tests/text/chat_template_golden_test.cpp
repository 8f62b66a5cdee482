// Real chat templates on many conversations, compared byte for byte with jinja2's output (tests/tools/make_template_golden.py).
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/mapped_file.h"
#include "support/support.h"
#include "text/chat_template.h"

namespace cachalot {
namespace {

using nlohmann::ordered_json;

ordered_json read_json(const std::string& name) {
  return ordered_json::parse(read_text_file(test::source_file("testdata/templates/" + name)));
}

// What the golden script takes as the time of the render: Friday, 4 July 2025, 09:05:03.
std::tm golden_time() {
  std::tm time{};
  time.tm_year = 125, time.tm_mon = 6, time.tm_mday = 4, time.tm_hour = 9, time.tm_min = 5, time.tm_sec = 3, time.tm_wday = 5,
  time.tm_yday = 184;
  return time;
}

// The golden variables of one conversation as a caller would give them.
ChatInput input_of(const ordered_json& variables) {
  ChatInput input;
  input.now = golden_time();
  input.extra = ordered_json::object();
  for (const auto& [key, value] : variables.items()) {
    if (key == "messages")
      input.messages = value;
    else if (key == "tools")
      input.tools = value;
    else if (key == "add_generation_prompt")
      input.add_generation_prompt = value.get<bool>();
    else
      input.extra[key] = value;
  }
  return input;
}

// "" when the outcome is as wanted, else what differs.
std::string difference(const ordered_json& wanted, const std::string& source, const std::string& name, const ChatInput& input) {
  std::string output;
  try {
    output = ChatTemplate::parse(source, name).render(input);
  } catch (const Error& error) {
    return wanted.contains("error") ? "" : fmt::format("refused: {}\n  wanted: {}", error.what(), wanted.at("output").dump());
  }
  if (wanted.contains("error"))
    return fmt::format("gave {}, though jinja2 fails: {}", ordered_json(output).dump(), wanted.at("error").dump());
  if (output == wanted.at("output").get<std::string>()) return {};
  return fmt::format("\n     got: {}\n  wanted: {}", ordered_json(output).dump(), wanted.at("output").dump());
}

TEST(chat_template_golden, equals_jinja2_on_every_conversation) {
  const ordered_json golden = read_json("golden.json");
  ASSERT_GE(golden.at("templates").size(), 12u);
  size_t compared = 0;
  for (const auto& [file, expected] : golden.at("templates").items()) {
    const std::string source = read_text_file(test::source_file("testdata/templates/" + file));
    size_t rendered = 0;
    for (const auto& [name, wanted] : expected.at("outcomes").items()) {
      ChatInput input = input_of(golden.at("conversations").at(name));
      if (!expected.at("bos_token").is_null()) input.bos_token = expected.at("bos_token").get<std::string>();
      if (!expected.at("eos_token").is_null()) input.eos_token = expected.at("eos_token").get<std::string>();
      EXPECT_EQ(difference(wanted, source, file, input), "") << file << ": " << name;
      rendered += wanted.contains("output") ? 1 : 0;
      ++compared;
    }
    EXPECT_GE(rendered, 12u) << file << " has too few conversations that render";
  }
  EXPECT_GE(compared, 700u);
}

// One small template per feature; the expected outputs are jinja2's.
TEST(chat_template_golden, equals_jinja2_on_every_feature_of_the_language) {
  const std::string text = read_text_file(test::source_file("testdata/templates/language.jsonl"));
  size_t cases = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    const ordered_json item = ordered_json::parse(text.substr(begin, end - begin));
    begin = end + 1;
    ++cases;
    const std::string source = item.at("template").get<std::string>();
    EXPECT_EQ(difference(item, source, "case", input_of(item.value("variables", ordered_json::object()))), "") << source;
  }
  EXPECT_GE(cases, 300u);
}

}  // namespace
}  // namespace cachalot
