// HttpClient.
#include "server/http_client.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>

namespace cachalot::test {

HttpClient::HttpClient(int port) {
  fd_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) ADD_FAILURE() << "cannot connect to port " << port;
}

HttpClient::HttpClient(const std::string& unix_socket) {
  fd_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  unix_socket.copy(address.sun_path, sizeof address.sun_path - 1);
  if (::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) ADD_FAILURE() << "cannot connect to " << unix_socket;
}

HttpClient::~HttpClient() { close(); }

void HttpClient::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void HttpClient::send(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n <= 0) return;  // the server hung up: the test sees it in the answer
    bytes.remove_prefix(static_cast<size_t>(n));
  }
}

void HttpClient::request(std::string_view method, std::string_view path, std::string_view body, const std::vector<std::string>& headers) {
  std::string text = std::string(method) + " " + std::string(path) + " HTTP/1.1\r\nHost: localhost\r\n";
  if (!body.empty()) text += "Content-Type: application/json\r\nContent-Length: " + std::to_string(body.size()) + "\r\n";
  for (const std::string& header : headers) text += header + "\r\n";
  send(text + "\r\n" + std::string(body));
}

bool HttpClient::receive() {
  pollfd poll{fd_, POLLIN, 0};
  if (::poll(&poll, 1, 20000) <= 0) return false;
  char buffer[65536];
  const ssize_t n = ::recv(fd_, buffer, sizeof buffer, 0);
  if (n <= 0) return false;
  received_.append(buffer, static_cast<size_t>(n));
  return true;
}

bool HttpClient::wait_for(std::string_view text) {
  while (received_.find(text) == std::string::npos)
    if (!receive()) return false;
  return true;
}

bool HttpClient::closed_by_server() {
  pollfd poll{fd_, POLLIN, 0};
  if (::poll(&poll, 1, 20000) <= 0) return false;
  char buffer[65536];
  ssize_t n = 0;
  while ((n = ::recv(fd_, buffer, sizeof buffer, 0)) > 0) received_.append(buffer, static_cast<size_t>(n));
  return true;
}

HttpAnswer HttpClient::answer() {
  HttpAnswer out;
  size_t head_end = 0;
  while (true) {
    while ((head_end = received_.find("\r\n\r\n")) == std::string::npos)
      if (!receive()) return out;
    out.headers.clear();
    size_t at = received_.find("\r\n");
    out.status = std::atoi(received_.substr(9, 3).c_str());
    while (at < head_end) {
      const size_t begin = at + 2, end = received_.find("\r\n", begin);
      const std::string line = received_.substr(begin, end - begin);
      const size_t colon = line.find(':');
      std::string name = line.substr(0, colon);
      std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
      if (colon != std::string::npos) out.headers[name] = line.substr(line.find_first_not_of(' ', colon + 1));
      at = end;
    }
    received_.erase(0, head_end + 4);
    if (out.status != 100) break;
  }
  if (out.headers.contains("content-length")) {
    const size_t length = std::stoul(out.headers["content-length"]);
    while (received_.size() < length)
      if (!receive()) return out;
    out.body = received_.substr(0, length);
    received_.erase(0, length);
    out.complete = true;
    return out;
  }
  if (!out.headers.contains("transfer-encoding")) {
    while (receive()) {
    }
    out.body.swap(received_);
    out.complete = true;
    return out;
  }
  while (true) {
    size_t line = 0;
    while ((line = received_.find("\r\n")) == std::string::npos)
      if (!receive()) return out;
    const size_t size = std::stoul(received_.substr(0, line), nullptr, 16);
    while (received_.size() < line + 2 + size + 2)
      if (!receive()) return out;
    out.body += received_.substr(line + 2, size);
    received_.erase(0, line + 2 + size + 2);
    if (size == 0) {
      out.complete = true;
      return out;
    }
  }
}

HttpAnswer http_get(int port, std::string_view path, const std::vector<std::string>& headers) {
  HttpClient client(port);
  client.request("GET", path, {}, headers);
  return client.answer();
}

HttpAnswer http_post(int port, std::string_view path, std::string_view body, const std::vector<std::string>& headers) {
  HttpClient client(port);
  client.request("POST", path, body, headers);
  return client.answer();
}

std::vector<std::string> sse_data(std::string_view body) {
  std::vector<std::string> out;
  while (!body.empty()) {
    const size_t end = std::min(body.find("\n\n"), body.size());
    std::string_view event = body.substr(0, end);
    body.remove_prefix(std::min(end + 2, body.size()));
    while (!event.empty()) {
      const size_t line_end = std::min(event.find('\n'), event.size());
      const std::string_view line = event.substr(0, line_end);
      if (line.starts_with("data: ")) out.emplace_back(line.substr(6));
      event.remove_prefix(std::min(line_end + 1, event.size()));
    }
  }
  return out;
}

}  // namespace cachalot::test
