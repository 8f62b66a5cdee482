// Any text of a model, cut anywhere: reasoning, content and calls are the same as for the text in one piece.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/answer_stream.h"

namespace {

using namespace cachalot::server;

struct Result {
  std::string reasoning, content;
  std::vector<std::pair<std::string, std::string>> calls;

  void add(const Delta& delta) {
    reasoning += delta.reasoning;
    content += delta.content;
    for (const ToolCallDelta& call : delta.calls) {
      if (static_cast<size_t>(call.index) == calls.size()) calls.emplace_back(call.name, "");
      if (static_cast<size_t>(call.index) >= calls.size()) std::abort();
      calls[static_cast<size_t>(call.index)].second += call.arguments;
    }
  }
  bool operator==(const Result&) const = default;
};

Result run(ToolFormat format, bool inside, std::string_view text, size_t step) {
  ReasoningSplitter splitter(inside);
  const auto parser = make_tool_parser(format);
  Result result;
  for (size_t at = 0; at < text.size(); at += step) {
    Delta delta;
    std::string rest;
    splitter.push(text.substr(at, step), delta.reasoning, rest);
    parser->push(rest, delta);
    result.add(delta);
  }
  Delta delta;
  std::string rest;
  splitter.finish(delta.reasoning, rest);
  parser->push(rest, delta);
  parser->finish(delta);
  result.add(delta);
  return result;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  constexpr ToolFormat kFormats[] = {ToolFormat::deepseek_v3, ToolFormat::deepseek_v31, ToolFormat::deepseek_v32, ToolFormat::hermes,
                                     ToolFormat::llama3};
  const ToolFormat format = kFormats[data[0] % 5];
  const bool inside = (data[0] & 0x80) != 0;
  const std::string_view text(reinterpret_cast<const char*>(data + 2), size - 2);
  const Result whole = run(format, inside, text, text.size() + 1);
  if (run(format, inside, text, 1) != whole || run(format, inside, text, 2 + data[1] % 13) != whole) std::abort();
  return 0;
}
