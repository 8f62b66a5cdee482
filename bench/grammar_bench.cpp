// Structured output on a real vocabulary: bench_grammar TOKENIZER_JSON. For each schema: time to compile, then, over texts that fit it, the
// time that each token waits for its mask, for the first request with the schema and for a second one.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "base/error.h"
#include "grammar/constraint.h"
#include "text/tokenizer.h"

namespace {

using namespace cachalot;

double microseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

struct Sample {
  const char *name, *schema, *text;
};

const Sample kSamples[] = {
    {"person",
     R"({"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer","minimum":0,"maximum":150},"email":{"type":"string","format":"email"}},"required":["name","age"]})",
     R"({"name": "Ada Lovelace, Countess of the Analytical Engine", "age": 36, "email": "ada@example.org"})"},
    {"list of records",
     R"({"type":"object","properties":{"items":{"type":"array","items":{"type":"object","properties":{"id":{"type":"integer"},"label":{"enum":["red","green","blue"]},"note":{"type":"string","maxLength":200},"score":{"type":"number"}},"required":["id","label"]}},"next":{"type":["string","null"]}},"required":["items","next"]})",
     R"({"items": [{"id": 1, "label": "red", "note": "The quick brown fox jumps over the lazy dog.", "score": 0.75}, {"id": 22, "label": "blue", "score": 1e-3}, {"id": 3, "label": "green", "note": "gr\u00fcn \"quoted\""}], "next": null})"},
    {"tree",
     R"({"$ref":"#/$defs/n","$defs":{"n":{"type":"object","properties":{"v":{"type":"string"},"c":{"type":"array","items":{"$ref":"#/$defs/n"}}},"required":["v","c"]}}})",
     R"({"v": "root", "c": [{"v": "left one", "c": [{"v": "leaf", "c": []}]}, {"v": "right", "c": []}]})"},
    {"any object", R"({"type":"object"})",
     R"({"a": [1, 2.5, {"b": null, "c": "text with some words in it"}], "d": {"e": true, "f": "naïve 例"}})"},
};

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 2) fail("usage: bench_grammar TOKENIZER_JSON");
  std::ifstream in(argv[1]);
  const std::string json((std::istreambuf_iterator<char>(in)), {});
  const Tokenizer tokenizer = Tokenizer::from_json(json, argv[1]);
  std::vector<std::string> bytes;
  for (int i = 0; i < tokenizer.size(); ++i) bytes.emplace_back(tokenizer.is_special(i) ? "" : tokenizer.piece(i));
  auto start = std::chrono::steady_clock::now();
  GrammarCompiler compiler(bytes, {tokenizer.eos().value_or(0)});
  fmt::print("{} tokens, tree in {:.0f} ms, ", tokenizer.size(), microseconds_since(start) / 1000);
  start = std::chrono::steady_clock::now();
  compiler.warm_up();
  fmt::print("warm-up in {:.0f} ms\n\n", microseconds_since(start) / 1000);
  fmt::print(
      "| schema | compile, ms | tokens | first request: mean us / largest us | second: mean us / largest us |\n| --- | --- | --- | --- | "
      "--- |\n");
  for (const Sample& sample : kSamples) {
    start = std::chrono::steady_clock::now();
    const auto grammar = compiler.compile({GrammarSource::Kind::json_schema, sample.schema});
    const double compile = microseconds_since(start) / 1000;
    const std::vector<int> ids = tokenizer.encode(sample.text);
    double mean[2], largest[2];
    for (int round = 0; round < 2; ++round) {
      auto constraint = GrammarCompiler::constraint(grammar);
      std::vector<double> times;
      for (const int id : ids) {
        start = std::chrono::steady_clock::now();
        const auto mask = constraint->allowed();
        const bool allowed = mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1u;
        const bool taken = constraint->accept(id);
        times.push_back(microseconds_since(start));
        if (!allowed || !taken) fail("{}: token \"{}\" does not fit", sample.name, tokenizer.piece(id));
      }
      mean[round] = 0;
      for (const double t : times) mean[round] += t / static_cast<double>(times.size());
      largest[round] = *std::max_element(times.begin(), times.end());
    }
    fmt::print("| {} | {:.1f} | {} | {:.1f} / {:.0f} | {:.1f} / {:.0f} |\n", sample.name, compile, ids.size(), mean[0], largest[0], mean[1],
               largest[1]);
  }
} catch (const cachalot::Error& error) {
  fmt::print(stderr, "{}\n", error.what());
  return 1;
}
