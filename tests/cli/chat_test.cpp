// The conversation: in a terminal, and through a pipe.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/program.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kInterrupt = "\x03";
constexpr const char* kEnd = "\x04";

std::vector<std::string> chat(std::vector<std::string> more = {}) {
  std::vector<std::string> arguments{"run", "-m", testdata("tiny-v3"), "--temp", "0"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

TEST(Chat, AnswersKeepsHistoryAndForgets) {
  Terminal terminal(chat({"-n", "12", "--ignore-eos"}));
  terminal.wait_for("> ");
  terminal.type("Tell me about the city.\n");
  terminal.wait_for("tokens/s");
  EXPECT_THAT(terminal.wait_for("> "), HasSubstr("peak memory"));
  terminal.type("And the river?\n");
  // The rows of the first exchange are used again.
  EXPECT_THAT(terminal.wait_for("> "), HasSubstr("from the cache"));
  terminal.type("/stats\n");
  EXPECT_THAT(terminal.wait_for("> "), HasSubstr("answers 2"));
  terminal.type("/reset\n");
  EXPECT_THAT(terminal.wait_for("> "), HasSubstr("empty again"));
  terminal.type("/help\n");
  EXPECT_THAT(terminal.wait_for("> "), HasSubstr("/exit"));
  terminal.type("/nonsense\n");
  EXPECT_THAT(terminal.wait_for("> "), HasSubstr("No command /nonsense"));
  terminal.type("/exit\n");
  EXPECT_EQ(terminal.exit_code(), 0);
}

TEST(Chat, InterruptEndsTheAnswerNotTheChat) {
  Terminal terminal(chat({"--ignore-eos", "--repeat-penalty", "1.1"}));
  terminal.wait_for("> ");
  terminal.type("Tell me everything.\n");
  terminal.wait_for("\n");  // the echo of what was typed
  terminal.read_for(300);   // some of the answer
  terminal.type(kInterrupt);
  terminal.wait_for("(interrupted)");
  terminal.wait_for("> ");
  terminal.type("/stats\n");
  EXPECT_THAT(terminal.wait_for("> "), HasSubstr("answers 1"));
  // At the prompt the first one warns, and anything typed forgets the warning; two in a row leave.
  terminal.type(kInterrupt);
  EXPECT_THAT(terminal.wait_for("> "), HasSubstr("once more"));
  terminal.type("/stats\n");
  terminal.wait_for("> ");
  terminal.type(kInterrupt);
  EXPECT_THAT(terminal.wait_for("> "), HasSubstr("once more"));
  terminal.type(kInterrupt);
  EXPECT_EQ(terminal.exit_code(), 130);
}

TEST(Chat, MessagesOfSeveralLines) {
  Terminal terminal(chat({"-n", "2", "--ignore-eos"}));
  terminal.wait_for("> ");
  terminal.type("one \\\n");
  terminal.wait_for("... ");
  terminal.type("two\n");
  terminal.wait_for("tokens/s");
  terminal.wait_for("> ");
  terminal.type("\"\"\"\n");
  terminal.wait_for("... ");
  terminal.type("/reset is text here\n");
  terminal.wait_for("... ");
  terminal.type("\"\"\"\n");
  EXPECT_THAT(terminal.wait_for("tokens/s"), Not(HasSubstr("empty again")));
  terminal.wait_for("> ");
  terminal.type(kEnd);
  EXPECT_EQ(terminal.exit_code(), 0);
}

TEST(Chat, ThroughAPipeOnlyAnswersArePrinted) {
  const ProgramResult both = run_program(chat({"-n", "6", "--ignore-eos", "-q"}), {.input = "Hello\nAgain\n"});
  EXPECT_EQ(both.code, 0) << both.err;
  EXPECT_EQ(both.err, "");
  EXPECT_THAT(both.out, Not(HasSubstr("> ")));
  const ProgramResult first = run_program(chat({"-n", "6", "--ignore-eos", "-q", "-p", "Hello"}));
  EXPECT_EQ(both.out.substr(0, first.out.size()), first.out) << "the first answer is that of a single prompt";
  // After /reset the same message gets the same answer.
  const ProgramResult reset = run_program(chat({"-n", "6", "--ignore-eos", "-q"}), {.input = "Hello\n/reset\nHello\n/exit\nnever read\n"});
  EXPECT_EQ(reset.out, first.out + first.out);
}

TEST(Chat, TooLongAMessageIsTakenBack) {
  std::string longest;
  for (int i = 0; i < 3000; ++i) longest += "word ";
  const ProgramResult result = run_program(chat({"-n", "6", "--ignore-eos"}), {.input = longest + "\nHello\n"});
  EXPECT_EQ(result.code, 0);
  EXPECT_THAT(result.err, HasSubstr("but the context holds 2048"));
  EXPECT_EQ(result.out, run_program(chat({"-n", "6", "--ignore-eos", "-q", "-p", "Hello"})).out);
}

TEST(Chat, NeedsATemplate) {
  const TempDir folder;
  for (const auto& entry : std::filesystem::directory_iterator(testdata("tiny-v3")))
    if (entry.path().filename() != "tokenizer_config.json")
      std::filesystem::create_symlink(entry.path(), folder.path() / entry.path().filename());
  const ProgramResult result = run_program({"run", "-m", folder.path()}, {.input = "Hello\n"});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err, HasSubstr("no chat template"));
}

}  // namespace
}  // namespace cachalot::test
