// Fuzz target: the input is a chat template, rendered on a fixed conversation under small limits. Any failure must be an Error.
#include <cstdint>
#include <string>

#include "base/error.h"
#include "text/chat_template.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const cachalot::ChatInput input = [] {
    cachalot::ChatInput chat;
    chat.messages = nlohmann::ordered_json::parse(R"([
      {"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "温度 😀"}]},
      {"role": "assistant", "content": null, "tool_calls": [{"id": "c0", "type": "function", "function": {"name": "f", "arguments": {"a": [1, 2.5, true]}}}]},
      {"role": "tool", "content": "{\"x\": 1}"}, {"role": "assistant", "content": "<think>\nno\n</think>\n\nyes", "reasoning_content": "r"}])");
    chat.tools = nlohmann::ordered_json::parse(R"([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}])");
    chat.bos_token = "<s>";
    chat.eos_token = "</s>";
    chat.now = std::tm{};
    return chat;
  }();
  cachalot::TemplateLimits limits;
  limits.max_steps = 20'000;
  limits.max_memory_bytes = 1u << 20;
  limits.max_output_bytes = 1u << 18;
  try {
    const auto parsed = cachalot::ChatTemplate::parse(std::string(reinterpret_cast<const char*>(data), size), "fuzz", limits);
    (void)parsed.render(input);
  } catch (const cachalot::Error&) {
  }
  return 0;
}
