// A model that is ready to serve: the engine, its text side, and what requests for it may ask. Turns requests into token ids.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cachalot/engine.h"
#include "server/answer_stream.h"
#include "server/requests.h"
#include "text/chat_prompt.h"
#include "text/tokenizer.h"

namespace cachalot::server {

// Makes what masks the tokens of one answer.
using ConstraintMaker = std::function<std::shared_ptr<TokenConstraint>()>;
// Compiles a wish, which may take tens of milliseconds, for any number of answers. Throws Error for one that cannot be honoured.
// `after_reasoning`: free until the reasoning part is closed.
using ConstraintFactory = std::function<ConstraintMaker(const ConstraintSpec& spec, bool after_reasoning)>;

struct ServiceOptions {
  std::vector<std::string> names;  // that requests may give as "model"; the first is the one that answers show
  RequestLimits limits;
  SamplingOptions defaults;
  int max_output_tokens = -1;    // cap on every answer; -1: the context
  double timeout_seconds = 0.0;  // of a request, queue included; 0: none
  Priority default_priority = Priority::interactive;
  nlohmann::ordered_json template_kwargs;  // object or null: variables for every chat
  std::optional<ToolFormat> tool_format;   // nothing: as the template shows
  bool split_reasoning = true;
  ConstraintFactory constraints;  // empty: wishes for a shape are refused
};

// A request that the engine can take, and how to read its answer.
struct Prepared {
  std::vector<std::vector<int>> prompts;
  std::vector<std::string> prompt_texts;  // of completions that echo
  AnswerOptions answer;
  CommonParams params;
  ConstraintMaker constraint;  // empty: none
  int max_tool_calls = INT32_MAX;
  bool echo = false, wants_reasoning = true, chat = false;
};

class Service {
 public:
  // Engine and tokenizer must outlive this. Throws Error when the template cannot be parsed or does not go with options.tool_format.
  Service(Engine& engine, const Tokenizer& tokenizer, std::optional<ChatTemplate> chat_template, ServiceOptions options);

  [[nodiscard]] Engine& engine() const { return engine_; }
  [[nodiscard]] const Tokenizer& tokenizer() const { return tokenizer_; }
  [[nodiscard]] const ServiceOptions& options() const { return options_; }
  [[nodiscard]] const std::string& name() const { return options_.names.front(); }
  [[nodiscard]] ToolFormat tool_format() const { return tool_format_; }
  [[nodiscard]] ParseContext parse_context() const;
  [[nodiscard]] int64_t created() const { return created_; }

  // 404 for a model of another name; an empty name is any.
  void check_model(const std::string& name) const;
  // Both may run on any thread. Throw ApiError; the length of the prompt is checked here, before anything is queued.
  [[nodiscard]] Prepared prepare(ChatRequest request) const;
  [[nodiscard]] Prepared prepare(CompletionRequest request) const;
  [[nodiscard]] ChatPrompt render(const ChatRequest& request) const;
  // Tokens that the answer to a prompt of this length may have; throws ApiError when that is none, or less than min_tokens.
  [[nodiscard]] int answer_limit(size_t n_prompt, const CommonParams& params) const;

 private:
  [[nodiscard]] ConstraintMaker constraint_of(const CommonParams& params, bool after_reasoning) const;
  void find_traits(const ChatTemplate& chat_template);

  Engine& engine_;
  const Tokenizer& tokenizer_;
  std::optional<ChatPrompter> prompter_;
  ServiceOptions options_;
  ToolFormat tool_format_ = ToolFormat::none;
  bool shows_tools_ = false;        // the template tells the model which tools there are
  bool shows_calls_ = false;        // and which it has called
  bool arguments_as_text_ = false;  // it wants a call's arguments as a string
  bool null_content_ = true;        // it wants the content of a turn that is all calls to be none
  int64_t created_ = 0;
};

}  // namespace cachalot::server
