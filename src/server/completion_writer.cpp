// /v1/completions.
#include <algorithm>

#include "server/writer_parts.h"

namespace cachalot::server {
namespace {

class CompletionWriter : public AnswerWriter {
 public:
  CompletionWriter(const Service& service, const Prepared& prepared, const std::string& id)
      : tokenizer_(service.tokenizer()),
        logprobs_(prepared.params.logprobs),
        top_(prepared.params.top_logprobs),
        token_ids_(prepared.params.return_token_ids),
        skip_special_(prepared.answer.skip_special),
        usage_(prepared.params.include_usage),
        every_usage_(prepared.params.continuous_usage),
        head_(object_head(service, id, "text_completion")) {
    text_offsets_.resize(prepared.prompts.size() * static_cast<size_t>(prepared.params.n));
    echoed_.resize(text_offsets_.size());
  }

  void start(std::string& out) override { static_cast<void>(out); }

  void delta(Choice& choice, const Delta& delta, std::string& out) override {
    std::string text;
    if (choice.echo != nullptr && !echoed_[static_cast<size_t>(choice.index)]) text = *choice.echo;
    text += delta.content;
    chunk(choice, text, nullptr, out);
  }

  void finish(Choice& choice, std::string& out) override { chunk(choice, {}, choice.finish_reason.c_str(), out); }

  void end(const TokenUse& use, std::string& out) override { end_stream(head_, usage_ ? &use : nullptr, out); }
  void fail(const ApiError& error, std::string& out) override { fail_stream(error, out); }

  std::string whole(std::span<Choice> choices, const TokenUse& use) override {
    std::string out = head_ + ",\"choices\":[";
    for (Choice& choice : choices) {
      if (choice.index > 0) out += ',';
      const std::string text = (choice.echo != nullptr ? *choice.echo : "") + choice.content;
      write_choice(choice, text, choice.finish_reason.c_str(), out);
    }
    out += "],\"usage\":";
    JsonWriter json(out);
    write_usage(json, use);
    out += '}';
    return out;
  }

 private:
  void chunk(Choice& choice, std::string_view text, const char* reason, std::string& out) {
    out += "data: ";
    out += head_;
    out += ",\"choices\":[";
    write_choice(choice, text, reason, out);
    out += ']';
    end_chunk(every_usage_ ? &choice.use : nullptr, usage_, out);
  }

  void write_choice(Choice& choice, std::string_view text, const char* reason, std::string& out) {
    JsonWriter json(out);
    json.begin_object().field("index", choice.index).field("text", text).key("logprobs");
    if (logprobs_)
      write_logprobs(json, choice);
    else
      json.null();
    json.key("finish_reason");
    if (reason != nullptr)
      json.value(reason);
    else
      json.null();
    write_stop_reason(json, choice);
    if (!logprobs_ && !choice.prompt_logprobs.empty() && reason != nullptr) write_prompt_logprobs(json, choice);
    if (token_ids_) {
      write_token_ids(json, choice);
      choice.token_ids.clear();
    }
    json.end_object();
    echoed_[static_cast<size_t>(choice.index)] = true;
  }

  struct Row {
    int token;
    bool is_text;          // a part of the text that is given
    const float* logprob;  // null for the first token of the prompt
    std::span<const TokenLogprob> top;
  };

  // tokens, token_logprobs, top_logprobs, text_offset; an echoed prompt's come first.
  void write_logprobs(JsonWriter& json, Choice& choice) {
    std::vector<Row> rows;
    if (choice.echo != nullptr && !echoed_[static_cast<size_t>(choice.index)]) {
      std::string_view echo = *choice.echo;
      for (size_t i = 0; i < choice.prompt.size(); ++i) {
        const int token = choice.prompt[i];
        // BOS was put before a prompt that does not spell it.
        const std::string_view text = tokenizer_.piece(token);
        const bool is_text = !tokenizer_.is_special(token) || echo.starts_with(text);
        if (is_text) echo.remove_prefix(std::min(text.size(), echo.size()));
        if (i == 0 || i - 1 >= choice.prompt_logprobs.size() || choice.prompt_logprobs[i - 1].empty())
          rows.push_back({token, is_text, nullptr, {}});
        else
          rows.push_back(
              {token, is_text, &choice.prompt_logprobs[i - 1].front().logprob, std::span(choice.prompt_logprobs[i - 1]).subspan(1)});
      }
    }
    for (const LoggedToken& token : choice.logged)
      rows.push_back({token.token, !skip_special_ || !tokenizer_.is_special(token.token), &token.logprob, token.top});
    json.begin_object().key("tokens").begin_array();
    for (const Row& row : rows) json.value(piece(row.token));
    json.end_array().key("token_logprobs").begin_array();
    for (const Row& row : rows) {
      if (row.logprob == nullptr)
        json.null();
      else
        json.value(json_logprob(*row.logprob));
    }
    json.end_array().key("top_logprobs").begin_array();
    for (const Row& row : rows) {
      if (row.logprob == nullptr || top_ == 0) {
        json.null();
        continue;
      }
      json.begin_object();
      for (const TokenLogprob& rival : row.top) json.field(piece(rival.token), json_logprob(rival.logprob));
      json.end_object();
    }
    json.end_array().key("text_offset").begin_array();
    int64_t& offset = text_offsets_[static_cast<size_t>(choice.index)];
    for (const Row& row : rows) {
      json.value(offset);
      if (row.is_text) offset += characters(tokenizer_.piece(row.token));
    }
    json.end_array().end_object();
    choice.logged.clear();
  }

  // vLLM's: one object per prompt token, null for the first.
  void write_prompt_logprobs(JsonWriter& json, const Choice& choice) const {
    json.key("prompt_logprobs").begin_array().null();
    for (const auto& entry : choice.prompt_logprobs) {
      json.begin_object();
      for (size_t i = 0; i < entry.size(); ++i) {
        if (i > 0 && entry[i].token == entry[0].token) continue;
        json.key(std::to_string(entry[i].token)).begin_object();
        json.field("logprob", json_logprob(entry[i].logprob)).field("decoded_token", piece(entry[i].token)).end_object();
      }
      json.end_object();
    }
    json.end_array();
  }

  [[nodiscard]] std::string piece(int token) const {
    return std::string(tokenizer_.is_special(token) ? tokenizer_.token_text(token) : tokenizer_.piece(token));
  }

  // Offsets count characters, as Python's do.
  static int64_t characters(std::string_view bytes) {
    return std::count_if(bytes.begin(), bytes.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; });
  }

  const Tokenizer& tokenizer_;
  const bool logprobs_;
  const int top_;
  const bool token_ids_, skip_special_, usage_, every_usage_;
  const std::string head_;
  std::vector<int64_t> text_offsets_;
  std::vector<bool> echoed_;
};

}  // namespace

std::unique_ptr<AnswerWriter> make_completion_writer(const Service& service, const Prepared& prepared, const std::string& id) {
  return std::make_unique<CompletionWriter>(service, prepared, id);
}

}  // namespace cachalot::server
