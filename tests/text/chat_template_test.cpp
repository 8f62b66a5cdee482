// Chat templates: errors and where they point, limits, hostile templates, odd conversations.
#include "text/chat_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>
#include <random>
#include <thread>

#include "base/mapped_file.h"
#include "support/support.h"

namespace cachalot {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

ChatInput hello() {
  ChatInput input;
  input.messages = nlohmann::ordered_json::parse(R"([{"role": "user", "content": "Hello"}])");
  return input;
}
std::string render(const std::string& source, const ChatInput& input = hello()) {
  return ChatTemplate::parse(source, "t.jinja").render(input);
}
std::string error_in(const std::string& source, const TemplateLimits& limits = {}) {
  return test::error_of([&] { (void)ChatTemplate::parse(source, "t.jinja", limits).render(hello()); });
}
std::string repeated(const std::string& text, size_t n) {
  std::string out;
  for (size_t i = 0; i < n; ++i) out += text;
  return out;
}

TEST(chat_template, variables_of_the_caller_are_seen) {
  ChatInput input = hello();
  input.bos_token = "<s>";
  input.extra = {{"enable_thinking", false}, {"n", 18446744073709551615u}};
  EXPECT_EQ(render("{{ bos_token }}{{ messages[0].content }}{{ enable_thinking }}{{ n }}{{ tools }}{{ add_generation_prompt }}{{ eos_token "
                   "is defined }}",
                   input),
            "<s>HelloFalse18446744073709551615NoneTrueFalse");
  input.extra["messages"] = "mine";
  EXPECT_EQ(render("{{ messages }}", input), "mine");
  input.extra = "text";
  EXPECT_THAT(test::error_of([&] { (void)render("", input); }), HasSubstr("expected an object"));
}

TEST(chat_template, date_is_the_callers) {
  ChatInput input = hello();
  input.now = std::tm{};
  input.now->tm_year = 126, input.now->tm_mon = 11, input.now->tm_mday = 5;
  EXPECT_EQ(render("{{ strftime_now('%d %b %Y') }}", input), "05 Dec 2026");
  input.now.reset();
  EXPECT_EQ(render("{{ strftime_now('%Y') }}", input).size(), 4u);
}

TEST(chat_template, syntax_errors_name_template_and_line) {
  EXPECT_THAT(error_in("a\nb\n{% if x %}\n"), AllOf(HasSubstr("template t.jinja, line 3"), HasSubstr("endif")));
  EXPECT_THAT(error_in("a\n{{ x +\n }}"), AllOf(HasSubstr("line 3"), HasSubstr("expected an expression")));
  EXPECT_THAT(error_in("a\n\n{{ 'x"), HasSubstr("line 3"));
  EXPECT_THAT(error_in("{# \n\n"), HasSubstr("comment has no end"));
  EXPECT_THAT(error_in("\n{% include 'x' %}"), AllOf(HasSubstr("line 2"), HasSubstr("include")));
  EXPECT_THAT(error_in("\n\n{{ x | nope }}"), AllOf(HasSubstr("line 3"), HasSubstr("unknown filter 'nope'")));
  EXPECT_THAT(error_in("{{ x is nope }}"), HasSubstr("unknown test 'nope'"));
  EXPECT_THAT(error_in("{% for x in y recursive %}{% endfor %}"), HasSubstr("recursive"));
  EXPECT_THAT(error_in("ab\xff"), HasSubstr("UTF-8"));
  EXPECT_THAT(error_in(std::string("{{ a\0b }}", 9)), HasSubstr("\\x00"));
}

TEST(chat_template, render_errors_name_template_line_and_cause) {
  EXPECT_THAT(error_in("a\n{{ raise_exception('Only users,\nplease') }}"),
              AllOf(HasSubstr("template t.jinja, line 2"), HasSubstr("Only users,")));
  EXPECT_THAT(error_in("\n\n{{ 'a' + messages[0].nope }}"), AllOf(HasSubstr("line 3"), HasSubstr("'nope' is undefined")));
  EXPECT_THAT(error_in("{% macro m() %}\n{{ 1 }}\n{% endmacro %}\n{{ m() + 1 }}"), AllOf(HasSubstr("line 4"), HasSubstr("cannot add")));
  EXPECT_THAT(error_in("{{ messages.x.y }}"), HasSubstr("'x' is undefined"));
  EXPECT_THAT(error_in("{{ f() }}"), HasSubstr("'f' is undefined"));
}

TEST(chat_template, only_data_can_be_reached) {
  for (const char* source :
       {"{{ ''.__class__.__mro__ }}", "{{ messages.__class__.__base__.__subclasses__() }}", "{{ lipsum.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}", "{{ namespace.__init__.__globals__ }}", "{{ range.__self__.x }}",
        "{{ ''.format.__self__.x }}", "{{ '{0.__class__.x}'.format('a') }}", "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}", "{{ messages[0].pop('role') }}", "{{ self.x }}", "{{ joiner() }}",
        "{{ open('/etc/passwd') }}", "{{ messages[0].clear() }}", "{{ (messages|attr('__class__')).x }}", "{{ namespace(__class__=1) }}"}) {
    EXPECT_THAT(error_in(source), HasSubstr("template t.jinja, line 1")) << source;
  }
  EXPECT_EQ(render("{{ messages.__class__ }}{{ ''.__class__ }}{{ messages[0].__class__ }}"), "");
}

TEST(chat_template, conversations_that_are_no_text_are_refused) {
  ChatInput input = hello();
  input.messages[0]["content"] = "\xff\xfe";
  EXPECT_THAT(test::error_of([&] { (void)render("{{ messages }}", input); }), HasSubstr("UTF-8"));
  input = hello();
  nlohmann::ordered_json deep = 1;
  for (int i = 0; i < 5000; ++i) deep = nlohmann::ordered_json::array({std::move(deep)});
  input.messages[0]["content"] = std::move(deep);
  EXPECT_THAT(test::error_of([&] { (void)render("{{ messages }}", input); }), HasSubstr("nested deeper"));
}

// Each hostile template must end in an Error that names the limit, soon and without much memory.
struct Hostile {
  const char* what;
  std::string source;
  const char* limit;
};
std::vector<Hostile> hostile_templates() {
  const std::string forever = "{% for i in range(100000) %}{% for j in range(100000) %}";
  return {
      {"6,000 parentheses", "{{ " + repeated("(", 6000) + "1" + repeated(")", 6000) + " }}", "max_nesting"},
      {"open parentheses alone", "{{ " + repeated("(", 100000), "has no end"},
      {"lists", "{{ " + repeated("[", 50000) + "1" + repeated("]", 50000) + " }}", "max_nesting"},
      {"dicts", "{{ " + repeated("{1:", 50000) + "1" + repeated("}", 50000) + " }}", "max_nesting"},
      {"not not not", "{{ " + repeated("not ", 50000) + "1 }}", "max_nesting"},
      {"minus signs", "{{ " + repeated("-", 50000) + "1 }}", "max_nesting"},
      {"ternaries", "{{ " + repeated("1 if 1 else ", 30000) + "1 }}", "max_nesting"},
      {"calls", "{{ " + repeated("f(", 50000) + "1" + repeated(")", 50000) + " }}", "max_nesting"},
      {"subscripts", "{{ " + repeated("a[", 50000) + "1" + repeated("]", 50000) + " }}", "max_nesting"},
      {"nested ifs", repeated("{% if 1 %}", 20000), "max_nesting"},
      {"nested fors", repeated("{% for a in b %}", 20000), "max_nesting"},
      {"nested targets", "{% set " + repeated("(", 50000) + "a" + repeated(")", 50000) + " = 1 %}", "max_nesting"},
      {"a long sum", "{{ 1" + repeated("+1", 100000) + " }}", "operations inside one another"},
      {"a long chain of attributes", "{{ a" + repeated(".a", 100000) + " }}", "operations inside one another"},
      {"a long chain of filters", "{{ a" + repeated("|e", 100000) + " }}", "operations inside one another"},
      {"a long chain of calls", "{{ a" + repeated("()", 100000) + " }}", "operations inside one another"},
      {"a large source", repeated("x", 600u << 10), "max_source_bytes"},
      {"range of 1e9", "{% for i in range(10**9) %}x{% endfor %}", "expected at most 100000"},
      {"loops of 1e10", forever + "{% endfor %}{% endfor %}", "max_steps"},
      {"loops that print", forever + "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}", "max_"},
      {"doubling a string", "{% set ns = namespace(s='x') %}{% for i in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
       "max_memory_bytes"},
      {"doubling with ~", "{% set ns = namespace(s='x') %}{% for i in range(100) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
       "max_memory_bytes"},
      {"doubling a list", "{% set ns = namespace(s=[1]) %}{% for i in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
       "max_memory_bytes"},
      {"a string times 1e9", "{{ 'x' * 10**9 }}", "max_memory_bytes"},
      {"a list times 1e18", "{{ [1] * 10**18 }}", "max_memory_bytes"},
      {"100 MB of output", forever + "{{ 'x' * 10000 }}{% endfor %}{% endfor %}", "max_output_bytes"},
      {"output in macros", "{% macro m(n) %}{{ 'x' * 1000000 }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}", "max_output_bytes"},
      {"macro recursion", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "max_eval_depth"},
      {"macros calling each other", "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
       "max_eval_depth"},
      {"recursion by caller", "{% macro m() %}{% call m() %}{{ caller() }}{% endcall %}{% endmacro %}{{ m() }}", "max_eval_depth"},
      {"lists in lists", "{% set ns = namespace(s=[]) %}{% for i in range(100000) %}{% set ns.s = [ns.s] %}{% endfor %}", "max_nesting"},
      {"dicts in dicts", "{% set ns = namespace(s={}) %}{% for i in range(100000) %}{% set ns.s = {'a': ns.s} %}{% endfor %}",
       "max_nesting"},
      {"loops in lists",
       "{% set ns = namespace(s=[1]) %}{% for i in range(100000) %}{% for x in ns.s %}{% set ns.s = [loop] %}{% endfor %}{% endfor %}",
       "max_nesting"},
      {"methods of methods", "{% set ns = namespace(s=[1]) %}{% for i in range(100000) %}{% set ns.s = [ns.s.copy] %}{% endfor %}",
       "max_nesting"},
      {"a namespace in itself", "{% set ns = namespace() %}{% set ns.s = [ns] %}{{ ns }}", "max_eval_depth"},
      {"wide sharing, printed",
       "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}", "max_"},
      {"wide sharing, to JSON",
       "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s|tojson }}", "max_"},
      {"wide sharing, compared",
       "{% set ns = namespace(s=[1], t=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% set ns.t = [ns.t, ns.t] %}{% endfor "
       "%}{{ ns.s == ns.t }}",
       "max_steps"},
      {"searching long texts",
       "{% set a = 'a' * 1000000 %}{% set b = 'a' * 500000 ~ 'b' %}" + forever + "{{ b in a }}{{ a.rfind(b) }}{% endfor %}{% endfor %}",
       "max_"},
      {"stripping many characters", "{% set a = 'a' * 1000000 %}" + forever + "{{ a.strip(a) }}{% endfor %}{% endfor %}", "max_"},
      {"replacing with longer text", "{{ ('x' * 1000000).replace('x', 'y' * 1000) }}", "max_memory_bytes"},
      {"joining long text", "{{ ('x' * 100000).join('y' * 100000) }}", "max_memory_bytes"},
      {"indenting", "{{ ('\\n' * 1000000)|indent(1000, blank=true) }}", "max_memory_bytes"},
      {"a wide field", "{{ '%1000000000d' % 1 }}", "max_memory_bytes"},
      {"a wide brace field", "{{ '{:1000000000}'.format(1) }}", "max_memory_bytes"},
      {"centring", "{{ 'x'.center(1000000000) }}", "max_memory_bytes"},
      {"indented JSON",
       "{% set ns = namespace(s=[1]) %}{% for i in range(150) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ([ns.s] * 10000)|tojson(indent=1000) "
       "}}",
       "max_memory_bytes"},
      {"a large power", "{{ 10 ** 1000000000 }}", "2^100"},
      {"a large float power", "{{ 2.0 ** 5000 }}{{ 10 ** 40 }}", "2^100"},
      {"sorting", "{% set ns = namespace(l=range(100000)|list) %}" + forever + "{{ ns.l|sort|length }}{% endfor %}{% endfor %}", "max_"},
      {"unique", "{{ range(100000)|unique|list|length }}", "max_steps"},
      {"a large dict",
       "{% set ns = namespace(l=[]) %}{{ dict(range(100000)|map('string')|map('list')|list) }}{{ dict(range(100000)|batch(2)|list)|length "
       "}}",
       "template t.jinja"},
      {"many macros kept", "{% macro m() %}{{ caller() }}{% endmacro %}" + forever + "{% call m() %}{% endcall %}{% endfor %}{% endfor %}",
       "max_"},
      {"many namespaces", forever + "{% set x = namespace(a=1) %}{% endfor %}{% endfor %}", "max_"},
      {"nested JSON text", "{{ ('[' * 100000 ~ ']' * 100000)|from_json }}", "nested deeper"},
      {"splitting", "{% set a = ' a' * 4000000 %}{{ a.split()|length }}", "max_memory_bytes"},
      {"characters of a long text", "{{ ('a' * 30000000)|list|length }}", "max_memory_bytes"},
  };
}

TEST(chat_template, hostile_templates_stop_at_a_limit_within_a_second) {
  for (const Hostile& hostile : hostile_templates()) {
    // Time of this process's own work, so that a busy machine does not fail the test.
    const std::clock_t start = std::clock();
    const std::string error = error_in(hostile.source);
    const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
    EXPECT_THAT(error, AllOf(HasSubstr("template t.jinja, line 1"), HasSubstr(hostile.limit))) << hostile.what;
    EXPECT_LT(seconds, 1.2) << hostile.what;  // max_seconds, looked at between steps
  }
}

TEST(chat_template, limits_are_the_callers) {
  TemplateLimits limits;
  limits.max_steps = 1000;
  EXPECT_THAT(error_in("{% for i in range(900) %}{{ i }}{% endfor %}", limits), HasSubstr("limit of 1000 steps (max_steps)"));
  limits = {};
  limits.max_output_bytes = 10;
  EXPECT_THAT(error_in("12345{{ 678901 }}", limits), HasSubstr("longer than 10 bytes (max_output_bytes)"));
  EXPECT_EQ(ChatTemplate::parse("12345{{ 67890 }}", "t", limits).render(hello()), "1234567890");
  limits = {};
  limits.max_seconds = 0;
  EXPECT_THAT(error_in("{% for i in range(90000) %}{{ i }}{% endfor %}", limits), HasSubstr("max_seconds"));
  limits = {};
  limits.max_nesting = 5;
  EXPECT_THAT(error_in("{{ ((((((1)))))) }}", limits), HasSubstr("deeper than 5 levels (max_nesting)"));
  limits = {};
  limits.max_source_bytes = 3;
  EXPECT_THAT(error_in("1234", limits), HasSubstr("max_source_bytes"));
}

// What honest templates and conversations need lies well inside the limits.
TEST(chat_template, large_conversations_render) {
  const std::string source = read_text_file(test::source_file("testdata/templates/deepseek-ai-DeepSeek-V3.2.jinja"));
  ChatInput input;
  for (int i = 0; i < 500; ++i) {
    input.messages.push_back({{"role", "user"}, {"content", repeated("多くの文字 and words. ", 200)}});
    input.messages.push_back({{"role", "assistant"}, {"content", "ok"}});
  }
  const std::string prompt = ChatTemplate::parse(source, "v3.2").render(input);
  EXPECT_GT(prompt.size(), 500u * 200 * 20);
  EXPECT_EQ(render("{{ 'x' * 1000000 }}").size(), 1000000u);
  EXPECT_EQ(render("{{ " + repeated("(", 190) + "1" + repeated(")", 190) + " }}"), "1");
  EXPECT_EQ(render("{{ 'a'" + repeated(" + 'a'", 300) + " }}").size(), 301u);
  EXPECT_EQ(render("{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}x{% endif %}{% endmacro %}{{ f(60) }}").size(), 60u);
}

// Template text cut, spliced and changed at random: anything but an Error or a result is a failure of the process.
TEST(chat_template, random_garbage_is_refused_or_rendered) {
  const std::vector<std::string> pieces = {"{{",
                                           "}}",
                                           "{%",
                                           "%}",
                                           "{#",
                                           "#}",
                                           "-",
                                           " if ",
                                           "else",
                                           " for x in ",
                                           "messages",
                                           "[",
                                           "]",
                                           "(",
                                           ")",
                                           "{",
                                           "}",
                                           "|",
                                           "'",
                                           "\"",
                                           "set x = ",
                                           "endfor",
                                           "endif",
                                           "macro m(a)",
                                           "endmacro",
                                           "x",
                                           "1",
                                           ".",
                                           ",",
                                           ":",
                                           "~",
                                           "*",
                                           "/",
                                           "is defined",
                                           "not ",
                                           " in ",
                                           "\n",
                                           "\\",
                                           "é",
                                           "\xff",
                                           "raw",
                                           "endraw",
                                           "namespace(a=1)",
                                           "loop.index",
                                           "|tojson",
                                           "call m()",
                                           "endcall",
                                           "range(3)",
                                           "[::-1]",
                                           "break",
                                           "filter upper",
                                           "endfilter",
                                           "%",
                                           "=",
                                           "=="};
  std::mt19937 random(7);
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  TemplateLimits limits;
  limits.max_steps = 20000;
  limits.max_memory_bytes = 1u << 20;
  size_t refused = 0, rendered = 0;
  const std::string real = read_text_file(test::source_file("testdata/templates/meta-llama-Llama-3.1-8B-Instruct.jinja"));
  for (int round = 0; round < 6000; ++round) {
    std::string source;
    if (round % 2 == 0) {
      const size_t n = 1 + below(30);
      for (size_t i = 0; i < n; ++i) source += pieces[below(pieces.size())];
    } else {
      source = real;
      for (size_t i = 0; i <= below(3); ++i) source.replace(below(source.size()), below(8), pieces[below(pieces.size())]);
    }
    try {
      (void)ChatTemplate::parse(source, "garbage", limits).render(hello());
      ++rendered;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("template garbage, line "));
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000u);
  EXPECT_GT(rendered, 100u);
}

TEST(chat_template, one_template_serves_several_threads) {
  const ChatTemplate parsed =
      ChatTemplate::parse("{% set ns = namespace(n=0) %}{% for i in range(1000) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "t");
  std::vector<std::string> outputs(4);
  std::vector<std::thread> threads;
  for (std::string& output : outputs) threads.emplace_back([&] { output = parsed.render(hello()); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(outputs, ::testing::Each("499500"));
}

TEST(prompt_opens_reasoning, looks_at_the_end_alone) {
  EXPECT_TRUE(prompt_opens_reasoning("<｜Assistant｜><think>\n"));
  EXPECT_TRUE(prompt_opens_reasoning("a<think>"));
  EXPECT_FALSE(prompt_opens_reasoning("<｜Assistant｜><think></think>"));
  EXPECT_FALSE(prompt_opens_reasoning("<think>\n\n</think>\n\n"));
  EXPECT_FALSE(prompt_opens_reasoning("<think> x"));
  EXPECT_FALSE(prompt_opens_reasoning(""));
}

}  // namespace
}  // namespace cachalot
