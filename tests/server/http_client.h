// A plain HTTP client for tests: blocking sockets, raw bytes where a test wants them.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace cachalot::test {

struct HttpAnswer {
  int status = 0;
  std::map<std::string, std::string> headers;  // names in lower case
  std::string body;                            // chunks joined
  bool complete = false;                       // ended as its header says
};

class HttpClient {
 public:
  explicit HttpClient(int port);
  explicit HttpClient(const std::string& unix_socket);
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  void send(std::string_view bytes);
  // Sends a request with a Host and, when there is a body, its length and type.
  void request(std::string_view method, std::string_view path, std::string_view body = {}, const std::vector<std::string>& headers = {});
  // Waits for a whole answer, 20 s at most.
  HttpAnswer answer();
  // Waits until the bytes received (of the answer under way) hold `text`, 20 s at most; false when the connection ended before.
  bool wait_for(std::string_view text);
  [[nodiscard]] const std::string& received() const { return received_; }
  // True when the server closes the connection, within 20 s.
  bool closed_by_server();
  void close();
  [[nodiscard]] int descriptor() const { return fd_; }

 private:
  bool receive();
  int fd_ = -1;
  std::string received_;
};

HttpAnswer http_get(int port, std::string_view path, const std::vector<std::string>& headers = {});
HttpAnswer http_post(int port, std::string_view path, std::string_view body, const std::vector<std::string>& headers = {});

// The data of each server-sent event.
std::vector<std::string> sse_data(std::string_view body);

}  // namespace cachalot::test
