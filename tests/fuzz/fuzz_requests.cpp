// Any bytes as the body of each endpoint: parsed, or refused with an ApiError, never anything else.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "server/requests.h"

namespace {

template <typename F>
void attempt(F&& parse) {
  try {
    parse();
  } catch (const cachalot::server::ApiError& error) {
    if (error.status != 400) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace cachalot::server;
  const std::string_view body(reinterpret_cast<const char*>(data), size);
  const ParseContext context{.defaults = {}, .vocab = 1000, .limits = {}};
  attempt([&] {
    const ChatRequest request = parse_chat_request(body, context);
    if (request.messages.empty() || request.common.n < 1 || request.common.n > context.limits.max_n) std::abort();
  });
  attempt([&] {
    const CompletionRequest request = parse_completion_request(body, context);
    if (request.prompts.empty()) std::abort();
    for (const auto& prompt : request.prompts)
      for (const int id : prompt.ids)
        if (id < 0 || id >= context.vocab) std::abort();
  });
  attempt([&] { static_cast<void>(parse_messages_request(body, context, size % 2 == 0)); });
  attempt([&] { static_cast<void>(parse_responses_request(body, context)); });
  attempt([&] { static_cast<void>(parse_tokenize_request(body, context)); });
  attempt([&] { static_cast<void>(parse_detokenize_request(body, context)); });
  return 0;
}
