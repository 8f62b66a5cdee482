// ServerFixture.
#include "server/server_fixture.h"

#include <fstream>
#include <sstream>

#include "support/support.h"
#include "text/unicode.h"

namespace cachalot::test {

const Tokenizer& byte_tokenizer() {
  static const Tokenizer tokenizer = [] {
    VocabData data{.name = "bytes", .model = "gpt2", .pre = "gpt-2"};
    for (int byte = 0; byte < 256; ++byte) {
      const char c = static_cast<char>(byte);
      data.tokens.push_back(unicode::bytes_to_alphabet({&c, 1}));
    }
    data.types.assign(256, 1);
    for (const char* text :
         {"<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>",
          "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"}) {
      data.tokens.emplace_back(text);
      data.types.push_back(text[1] == 't' || text[1] == '/' ? 4 : 3);
    }
    data.bos = 256;
    data.eos = 257;
    return Tokenizer::from_vocab(data);
  }();
  return tokenizer;
}

std::string template_text(const std::string& name) {
  std::ifstream in(source_file("testdata/templates/" + name + ".jinja"));
  std::ostringstream text;
  text << in.rdbuf();
  EXPECT_FALSE(text.str().empty()) << name;
  return text.str();
}

std::function<int(const Request&, int)> answer_with(const std::string& text) {
  const auto ids = std::make_shared<std::vector<int>>(byte_tokenizer().encode(text, {.parse_special = true}));
  return [ids](const Request&, int i) { return i < static_cast<int>(ids->size()) ? (*ids)[static_cast<size_t>(i)] : -1; };
}

ServerFixture::ServerFixture(FixtureOptions options) : options_(std::move(options)) {
  options_.engine.info.vocab = byte_tokenizer().size();
  options_.engine.info.eos_ids = {257};
  engine_ = std::make_unique<StubEngine>(options_.engine);
  options_.server.http.port = 0;
  options_.server.admin.port = 0;
  if (options_.server.log_file.empty()) options_.server.log_file = "/dev/null";
  server_ = std::make_unique<server::Server>(std::move(options_.server));
  server_->start();
  if (options_.serve) load();
}

void ServerFixture::load() {
  std::optional<ChatTemplate> chat_template;
  if (!options_.chat_template.empty()) chat_template = ChatTemplate::parse(template_text(options_.chat_template), options_.chat_template);
  server_->serve(std::make_unique<server::Service>(*engine_, byte_tokenizer(), std::move(chat_template), options_.service));
}

HttpAnswer ServerFixture::chat(const std::string& fields, const std::vector<std::string>& headers) const {
  return http_post(port(), "/v1/chat/completions",
                   R"({"messages":[{"role":"user","content":"hi"}])" + (fields.empty() ? "" : "," + fields) + "}", headers);
}

}  // namespace cachalot::test
