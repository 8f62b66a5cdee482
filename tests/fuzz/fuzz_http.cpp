// Any bytes through a socket into a running server: it answers or hangs up, and still answers the next client. Each input is sent in two
// pieces.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "server/server.h"

namespace {

using namespace cachalot;

// Refuses everything: what lies behind submit() has tests of its own.
class NoEngine : public Engine {
 public:
  RequestId submit(Request, OnEvent) override { throw Refused(Refused::Reason::queue_full, "full", 1.0); }
  void cancel(RequestId) override {}
  void close() override {}
  void after_step(std::function<void()>) override {}
  [[nodiscard]] EngineStats stats() const override { return {}; }
  [[nodiscard]] const EngineInfo& info() const override { return info_; }

 private:
  EngineInfo info_{.model = "none", .vocab = 256, .max_context = 4096, .max_requests = 1, .eos_ids = {}};
};

struct World {
  World() : tokenizer(make_tokenizer()) {
    server::ServerOptions options;
    path = "/tmp/cachalot-fuzz-http-" + std::to_string(::getpid());
    options.http.unix_socket = path;
    options.http.io_threads = 1;
    options.log_level = server::LogLevel::off;
    server = std::make_unique<server::Server>(std::move(options));
    server->start();
    server->serve(std::make_unique<server::Service>(engine, tokenizer, ChatTemplate::parse("{{ messages[0].content }}", "fuzz"),
                                                    server::ServiceOptions{}));
  }
  static Tokenizer make_tokenizer() {
    VocabData data{.name = "letters", .model = "gpt2", .pre = "gpt-2"};
    for (char c = '!'; c < 127; ++c) data.tokens.emplace_back(1, c);
    data.types.assign(data.tokens.size(), 1);
    return Tokenizer::from_vocab(data);
  }
  [[nodiscard]] int connect() const {
    const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
    if (::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) std::abort();
    return fd;
  }

  Tokenizer tokenizer;
  NoEngine engine;
  std::string path;
  std::unique_ptr<server::Server> server;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static World* const world = new World;
  if (size == 0) return 0;
  const int fd = world->connect();
  const size_t cut = data[0] * size / 256;
  static_cast<void>(::send(fd, data, cut, MSG_NOSIGNAL));
  static_cast<void>(::send(fd, data + cut, size - cut, MSG_NOSIGNAL));
  ::shutdown(fd, SHUT_WR);
  char buffer[4096];
  while (::recv(fd, buffer, sizeof buffer, 0) > 0) {
  }
  ::close(fd);
  return 0;
}
