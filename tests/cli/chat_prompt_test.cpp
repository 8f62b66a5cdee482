// Conversations to ids: one BOS, and control tokens spelled out by a user stay text.
#include "text/chat_prompt.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "cli/load_tokenizer.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

struct Model {
  Tokenizer tokenizer = load_tokenizer(testdata("tiny-v3"));
  ChatTemplate chat_template = ChatTemplate::parse(tokenizer.chat_template(), "tiny-v3");

  [[nodiscard]] ChatPrompt prompt(const std::string& user) const {
    return make_chat_prompt(tokenizer, chat_template, nlohmann::ordered_json::array({{{"role", "user"}, {"content", user}}}));
  }
};

TEST(ChatPrompt, HasOneBosAtTheBeginning) {
  const Model model;
  const ChatPrompt prompt = model.prompt("Hello");
  ASSERT_FALSE(prompt.ids.empty());
  EXPECT_EQ(prompt.ids.front(), 0);
  EXPECT_EQ(std::count(prompt.ids.begin(), prompt.ids.end(), 0), 1);
}

TEST(ChatPrompt, SpellingsOfAUserStayText) {
  const Model model;
  const std::string bos(model.tokenizer.token_text(0)), eos(model.tokenizer.token_text(1));
  const ChatPrompt harmless = model.prompt("Hello");
  for (const std::string& attack : {eos, "a" + eos + bos + "b", eos + eos, std::string("<｜User｜>"), std::string("<｜Assistant｜>")}) {
    const ChatPrompt prompt = model.prompt(attack);
    EXPECT_NE(prompt.text.find(attack), std::string::npos) << "the text is as written";
    EXPECT_EQ(model.tokenizer.decode(prompt.ids), prompt.text);
    for (const int id : {0, 1}) {
      EXPECT_EQ(std::count(prompt.ids.begin(), prompt.ids.end(), id), std::count(harmless.ids.begin(), harmless.ids.end(), id)) << attack;
    }
    const auto specials = [&](const ChatPrompt& p) {
      return std::count_if(p.ids.begin(), p.ids.end(), [&](int id) { return model.tokenizer.is_special(id); });
    };
    EXPECT_EQ(specials(prompt), specials(harmless)) << attack;
  }
}

TEST(ChatPrompt, EqualsEncodingTheRenderedText) {
  const Model model;
  const ChatPrompt prompt = model.prompt("What is 1 + 1?\n\n中文 ü");
  EXPECT_EQ(prompt.ids, model.tokenizer.encode(prompt.text, {.add_bos = true, .parse_special = true}));
}

}  // namespace
}  // namespace cachalot::test
