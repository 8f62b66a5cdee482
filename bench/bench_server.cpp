// The server under load, in front of an engine that only counts: many open streams, many short requests, clients that vanish.
//   bench_server streams [N] [SECONDS] [TOKENS_PER_SECOND]
//   bench_server requests [CONNECTIONS] [SECONDS]
//   bench_server disconnects [REQUESTS] [ROUNDS]
// The server runs in a process of its own, so that its memory can be read; the clients are one thread of this one. And a `cachalot serve`
// with a real model, listening on PORT of this machine: short urgent streams while long prompts of class P1 are read all the time.
//   bench_server prefill PORT [SECONDS] [LONG_PROMPTS_AT_A_TIME] [WORDS]
#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <malloc.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "base/error.h"
#include "server/server.h"
#include "server/stub_engine.h"
#include "text/unicode.h"

namespace {

using namespace cachalot;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point then) { return std::chrono::duration<double>(Clock::now() - then).count(); }

Tokenizer byte_tokenizer() {
  VocabData data{.name = "bytes", .model = "gpt2", .pre = "gpt-2"};
  for (int byte = 0; byte < 256; ++byte) {
    const char c = static_cast<char>(byte);
    data.tokens.push_back(unicode::bytes_to_alphabet({&c, 1}));
  }
  data.types.assign(256, 1);
  return Tokenizer::from_vocab(data);
}

// The child: serves until its parent closes the pipe; a byte there asks for the bytes that are allocated and not freed.
[[noreturn]] void run_server(int report, int until, double tokens_per_second, int answer_tokens) {
  const Tokenizer tokenizer = byte_tokenizer();
  test::StubOptions stub;
  stub.info = {.model = "stub", .vocab = 256, .max_context = 1 << 24, .max_requests = 1 << 20, .eos_ids = {}};
  stub.step_period = std::chrono::microseconds(tokens_per_second > 0 ? static_cast<int64_t>(1e6 / tokens_per_second) : 200);
  stub.script = [answer_tokens](const Request&, int i) { return answer_tokens < 0 || i < answer_tokens ? 'a' + i % 26 : -1; };
  test::StubEngine engine(stub);
  server::ServerOptions options;
  options.http.port = 0;
  options.http.max_connections = 1 << 20;
  options.log_requests = false;
  options.log_level = server::LogLevel::off;
  server::Server server(std::move(options));
  server.start();
  server.serve(std::make_unique<server::Service>(
      engine, tokenizer, ChatTemplate::parse("{% for m in messages %}{{ m.content }}{% endfor %}", "bench"), server::ServiceOptions{}));
  const int port = server.port();
  if (::write(report, &port, sizeof port) != sizeof port) std::_Exit(1);
  char byte = 0;
  while (::read(until, &byte, 1) > 0) {
    const struct mallinfo2 info = ::mallinfo2();
    const int64_t in_use = static_cast<int64_t>(info.uordblks + info.hblkhd);
    if (::write(report, &in_use, sizeof in_use) != sizeof in_use) std::_Exit(1);
  }
  std::_Exit(0);
}

struct Child {
  pid_t pid;
  int port, until, from;

  explicit Child(double tokens_per_second, int answer_tokens) {
    int report[2], stop[2];
    if (::pipe2(report, O_CLOEXEC) != 0 || ::pipe2(stop, O_CLOEXEC) != 0) fail("no pipe");
    pid = ::fork();
    if (pid == 0) {
      ::close(stop[1]);
      run_server(report[1], stop[0], tokens_per_second, answer_tokens);
    }
    ::close(report[1]);
    ::close(stop[0]);
    until = stop[1];
    from = report[0];
    if (::read(from, &port, sizeof port) != sizeof port) fail("the server did not start");
  }
  ~Child() {
    ::close(until);
    ::close(from);
    ::waitpid(pid, nullptr, 0);
  }
  [[nodiscard]] double resident_mb() const {
    std::ifstream status(fmt::format("/proc/{}/status", pid));
    for (std::string line; std::getline(status, line);)
      if (line.starts_with("VmRSS:")) return std::stod(line.substr(6)) / 1024.0;
    return 0;
  }
  [[nodiscard]] double allocated_mb() const {
    int64_t bytes = 0;
    if (::write(until, "?", 1) != 1 || ::read(from, &bytes, sizeof bytes) != sizeof bytes) fail("the server is gone");
    return static_cast<double>(bytes) / 1048576.0;
  }
  [[nodiscard]] double cpu_seconds() const {
    std::ifstream stat(fmt::format("/proc/{}/stat", pid));
    std::string word;
    double ticks = 0;
    for (int i = 1; i <= 15 && stat >> word; ++i)
      if (i >= 14) ticks += std::stod(word);
    return ticks / static_cast<double>(::sysconf(_SC_CLK_TCK));
  }
  [[nodiscard]] int descriptors() const {
    int n = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(fmt::format("/proc/{}/fd", pid))) ++n;
    return n;
  }
};

int connect_to(int port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (fd < 0 || ::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) fail("cannot connect: {}", std::strerror(errno));
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::fcntl(fd, F_SETFL, O_NONBLOCK);
  return fd;
}

std::string request_of(bool stream, int max_tokens) {
  const std::string body =
      fmt::format("{{\"messages\":[{{\"role\":\"user\",\"content\":\"hello\"}}]{}{}}}", stream ? ",\"stream\":true" : "",
                  max_tokens > 0 ? fmt::format(",\"max_tokens\":{}", max_tokens) : "");
  return fmt::format(
      "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{}",
      body.size(), body);
}

void must_send(int fd, const std::string& bytes) {
  if (::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(bytes.size()))
    fail("cannot send: {}", std::strerror(errno));
}

int count(std::string_view text, std::string_view needle) {
  int n = 0;
  for (size_t at = text.find(needle); at != std::string_view::npos; at = text.find(needle, at + needle.size())) ++n;
  return n;
}

double percentile(std::vector<float>& values, double p) {
  if (values.empty()) return 0;
  const auto at = static_cast<std::ptrdiff_t>(p * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return static_cast<double>(values[static_cast<size_t>(at)]);
}

int run_streams(int n, double seconds, double rate) {
  const Child child(rate, -1);
  const double before = child.resident_mb();
  const int epoll = ::epoll_create1(EPOLL_CLOEXEC);
  struct Stream {
    int fd;
    int64_t tokens = 0;
    Clock::time_point last;
  };
  std::vector<Stream> streams;
  std::vector<float> gaps;
  const std::string request = request_of(true, 0);
  std::vector<char> buffer(1 << 18);
  bool measuring = false;
  int64_t bytes = 0;
  const auto drain = [&](int timeout_ms) {
    epoll_event events[1024];
    const int ready = ::epoll_wait(epoll, events, 1024, timeout_ms);
    const auto now = Clock::now();
    for (int i = 0; i < ready; ++i) {
      Stream& s = streams[events[i].data.u32];
      const ssize_t got = ::recv(s.fd, buffer.data(), buffer.size(), 0);
      if (got <= 0) fail("a stream ended");
      if (!measuring) continue;
      bytes += got;
      const int tokens = count({buffer.data(), static_cast<size_t>(got)}, "\"content\":");
      if (tokens == 0) continue;
      if (s.tokens > 0) gaps.push_back(static_cast<float>(std::chrono::duration<double>(now - s.last).count()));
      s.tokens += tokens;
      s.last = now;
    }
  };
  streams.reserve(static_cast<size_t>(n));
  for (int i = 0; i < n; ++i) {
    streams.push_back({connect_to(child.port), 0, {}});
    epoll_event event{.events = EPOLLIN, .data = {.u32 = static_cast<uint32_t>(i)}};
    ::epoll_ctl(epoll, EPOLL_CTL_ADD, streams.back().fd, &event);
    must_send(streams.back().fd, request);
    if (i % 100 == 99) drain(0);
  }
  for (const auto until = Clock::now() + std::chrono::seconds(2); Clock::now() < until;) drain(100);
  measuring = true;
  const double cpu = child.cpu_seconds();
  const auto start = Clock::now();
  while (seconds_since(start) < seconds) drain(100);
  const double took = seconds_since(start), after = child.resident_mb();
  int64_t least = INT64_MAX, most = 0, total = 0;
  for (const Stream& s : streams) {
    least = std::min(least, s.tokens);
    most = std::max(most, s.tokens);
    total += s.tokens;
  }
  fmt::print("streams {}  seconds {:.1f}  tokens/s {:.0f} of {:.0f} asked  per stream {:.2f} to {:.2f} tokens/s\n", n, took,
             static_cast<double>(total) / took, n * rate, static_cast<double>(least) / took, static_cast<double>(most) / took);
  fmt::print("gap between reads p50 {:.1f} ms  p99 {:.1f} ms  max {:.1f} ms   {:.1f} MB/s\n", percentile(gaps, 0.5) * 1e3,
             percentile(gaps, 0.99) * 1e3, percentile(gaps, 1.0) * 1e3, static_cast<double>(bytes) / took / 1e6);
  fmt::print("server CPU {:.2f} cores  memory {:.1f} MB, {:.1f} KB a stream\n", (child.cpu_seconds() - cpu) / took, after,
             (after - before) * 1024.0 / n);
  return static_cast<double>(least) / took > 0.9 * rate ? 0 : 1;
}

int run_requests(int connections, double seconds) {
  const Child child(0, 8);
  const int epoll = ::epoll_create1(EPOLL_CLOEXEC);
  std::vector<int> fds;
  std::vector<Clock::time_point> sent;
  std::vector<std::string> received(static_cast<size_t>(connections));
  std::vector<float> times;
  const std::string request = request_of(false, 8);
  for (int i = 0; i < connections; ++i) {
    fds.push_back(connect_to(child.port));
    epoll_event event{.events = EPOLLIN, .data = {.u32 = static_cast<uint32_t>(i)}};
    ::epoll_ctl(epoll, EPOLL_CTL_ADD, fds.back(), &event);
    must_send(fds.back(), request);
    sent.push_back(Clock::now());
  }
  std::vector<char> buffer(1 << 16);
  const double cpu = child.cpu_seconds();
  const auto start = Clock::now();
  while (seconds_since(start) < seconds) {
    epoll_event events[256];
    const int ready = ::epoll_wait(epoll, events, 256, 100);
    for (int i = 0; i < ready; ++i) {
      const size_t at = events[i].data.u32;
      const ssize_t got = ::recv(fds[at], buffer.data(), buffer.size(), 0);
      if (got <= 0) fail("a connection ended");
      received[at].append(buffer.data(), static_cast<size_t>(got));
      if (!received[at].ends_with("}}")) continue;
      if (!received[at].starts_with("HTTP/1.1 200")) fail("found {}", received[at].substr(0, 200));
      times.push_back(static_cast<float>(seconds_since(sent[at])));
      received[at].clear();
      sent[at] = Clock::now();
      must_send(fds[at], request);
    }
  }
  const double took = seconds_since(start);
  const auto n = times.size();
  fmt::print("connections {}  requests/s {:.0f}  of 8 tokens each  p50 {:.2f} ms  p99 {:.2f} ms  server CPU {:.2f} cores\n", connections,
             static_cast<double>(n) / took, percentile(times, 0.5) * 1e3, percentile(times, 0.99) * 1e3,
             (child.cpu_seconds() - cpu) / took);
  return static_cast<double>(n) / took >= 2000 ? 0 : 1;
}

// Requests of all kinds, each hung up on at a random moment; then all must be as before.
int run_disconnects(int requests, int rounds) {
  const Child child(2000, 200);
  std::mt19937 random(1);
  const std::string kinds[] = {request_of(true, 0), request_of(false, 0), request_of(true, 3), request_of(false, 3)};
  const auto round = [&](int n) {
    constexpr size_t kOpen = 64;
    std::vector<std::pair<int, Clock::time_point>> open;
    std::vector<char> buffer(1 << 16);
    for (int i = 0; i < n; ++i) {
      const std::string& request = kinds[random() % 4];
      const int fd = connect_to(child.port);
      // Some send only a part of the request.
      const size_t part = random() % 8 == 0 ? random() % request.size() : request.size();
      static_cast<void>(::send(fd, request.data(), part, MSG_NOSIGNAL));
      open.emplace_back(fd, Clock::now());
      if (open.size() < kOpen) continue;
      const size_t victim = random() % open.size();
      if (random() % 2 == 0) static_cast<void>(::recv(open[victim].first, buffer.data(), buffer.size(), 0));
      if (random() % 4 == 0) {  // with a reset in place of an end
        const linger hard{1, 0};
        ::setsockopt(open[victim].first, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
      }
      ::close(open[victim].first);
      open[victim] = open.back();
      open.pop_back();
    }
    for (const auto& [fd, when] : open) ::close(fd);
    ::usleep(2500000);
  };
  round(std::min(requests / 10, 2000));
  const double before = child.resident_mb(), allocated = child.allocated_mb();
  const int descriptors = child.descriptors();
  const auto start = Clock::now();
  double grown = 0, kept = 0;
  for (int i = 0; i < rounds; ++i) {
    round(requests);
    grown = child.resident_mb() - before;
    kept = child.allocated_mb() - allocated;
    fmt::print("round {}: resident memory grown {:.2f} MB, allocated {:.2f} MB\n", i + 1, grown, kept);
  }
  const double took = seconds_since(start);
  const int fd = connect_to(child.port);
  ::fcntl(fd, F_SETFL, 0);
  must_send(fd, "GET /load HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
  std::string answer;
  char buffer[4096];
  for (ssize_t got = 0; (got = ::recv(fd, buffer, sizeof buffer, 0)) > 0;) answer.append(buffer, static_cast<size_t>(got));
  ::close(fd);
  ::usleep(200000);
  const bool idle = answer.find("\"server_load\":0}") != std::string::npos;
  fmt::print("requests {}  seconds {:.1f}  descriptors {} then {}  left in the engine: {}\n", requests * rounds, took, descriptors,
             child.descriptors(), idle ? "nothing" : answer);
  return idle && kept < 5.0 && child.descriptors() <= descriptors ? 0 : 1;
}

std::string words(std::mt19937& random, int n) {
  std::string out;
  for (int i = 0; i < n; ++i) out += fmt::format("{}word{}", i > 0 ? " " : "", random() % 1000);
  return out;
}

std::string post_of(const std::string& body) {
  return fmt::format(
      "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{}",
      body.size(), body);
}

// Value of a series of /metrics.
double metric(int port, std::string_view series) {
  const int fd = connect_to(port);
  ::fcntl(fd, F_SETFL, 0);
  must_send(fd, "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
  std::string text;
  char buffer[65536];
  for (ssize_t got = 0; (got = ::recv(fd, buffer, sizeof buffer, 0)) > 0;) text.append(buffer, static_cast<size_t>(got));
  ::close(fd);
  const size_t at = text.find(fmt::format("\n{}", series));
  if (at == std::string::npos) fail("/metrics has no {}", series);
  return std::atof(text.c_str() + text.find('}', at) + 1);
}

// What urgent requests wait for while prompts are read: the header's first byte, a place, the first token.
int run_prefill(int port, double seconds, int n_long, int n_words) {
  std::mt19937 random(1);
  const auto long_request = [&] {
    return post_of(
        fmt::format(R"({{"messages":[{{"role":"user","content":"{}"}}],"max_tokens":1,"priority":"P1"}})", words(random, n_words)));
  };
  std::vector<pollfd> polled;
  std::vector<std::string> received(static_cast<size_t>(n_long) + 1);
  for (int i = 0; i < n_long; ++i) {
    polled.push_back({connect_to(port), POLLIN, 0});
    must_send(polled.back().fd, long_request());
  }
  polled.push_back({connect_to(port), POLLIN, 0});
  const auto queued = [&](const char* what) { return metric(port, fmt::format("cachalot:queue_seconds_{}", what)); };  // P0 comes first
  const double waited = queued("sum"), n_waited = queued("count"), steps = metric(port, "cachalot:engine_steps_total");
  std::vector<float> headers, tokens;
  int n_read = 0;
  bool asked = false, token_seen = false;
  Clock::time_point sent, next = Clock::now();
  std::vector<char> buffer(1 << 16);
  const auto start = Clock::now();
  while (seconds_since(start) < seconds) {
    if (!asked && Clock::now() >= next) {
      received.back().clear();
      asked = true;
      token_seen = false;
      sent = Clock::now();
      must_send(polled.back().fd,
                post_of(fmt::format(R"({{"messages":[{{"role":"user","content":"{}"}}],"max_tokens":2,"stream":true,"priority":"P0"}})",
                                    words(random, 4))));
    }
    ::poll(polled.data(), polled.size(), 1);
    for (size_t i = 0; i < polled.size(); ++i) {
      if (polled[i].revents == 0) continue;
      const ssize_t got = ::recv(polled[i].fd, buffer.data(), buffer.size(), 0);
      if (got <= 0) fail("a connection ended: {}", received[i].substr(0, 300));
      const bool urgent = i + 1 == polled.size();
      if (urgent && received[i].empty()) headers.push_back(static_cast<float>(seconds_since(sent)));
      received[i].append(buffer.data(), static_cast<size_t>(got));
      if (!received[i].starts_with("HTTP/1.1 200")) fail("found {}", received[i].substr(0, 300));
      if (urgent) {
        const size_t first = received[i].find("\"delta\"");
        if (!token_seen && first != std::string::npos && received[i].find("\"delta\"", first + 1) != std::string::npos) {
          token_seen = true;
          tokens.push_back(static_cast<float>(seconds_since(sent)));
        }
        if (received[i].ends_with("0\r\n\r\n")) {
          asked = false;
          next = Clock::now() + std::chrono::milliseconds(20);
        }
      } else if (received[i].ends_with("}}")) {
        ++n_read;
        received[i].clear();
        must_send(polled[i].fd, long_request());
      }
    }
  }
  const double step = seconds_since(start) / (metric(port, "cachalot:engine_steps_total") - steps);
  fmt::print("urgent requests {}  header's first byte p50 {:.2f} ms  p99 {:.2f} ms  max {:.2f} ms\n", headers.size(),
             percentile(headers, 0.5) * 1e3, percentile(headers, 0.99) * 1e3, percentile(headers, 1.0) * 1e3);
  fmt::print(
      "first token p50 {:.1f} ms  p99 {:.1f} ms  max {:.1f} ms   long prompts read {}  a step {:.1f} ms  an urgent request waits {:.1f} ms "
      "for a "
      "place\n",
      percentile(tokens, 0.5) * 1e3, percentile(tokens, 0.99) * 1e3, percentile(tokens, 1.0) * 1e3, n_read, step * 1e3,
      (queued("sum") - waited) / (queued("count") - n_waited) * 1e3);
  for (const pollfd& p : polled) ::close(p.fd);
  return percentile(headers, 0.99) <= 0.005 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &files);
  const auto number = [&](int i, double fallback) { return argc > i ? std::atof(argv[i]) : fallback; };
  const std::string mode = argc > 1 ? argv[1] : "";
  try {
    if (mode == "streams") return run_streams(static_cast<int>(number(2, 10000)), number(3, 10), number(4, 20));
    if (mode == "requests") return run_requests(static_cast<int>(number(2, 64)), number(3, 5));
    if (mode == "disconnects") return run_disconnects(static_cast<int>(number(2, 100000)), static_cast<int>(number(3, 1)));
    if (mode == "prefill" && argc > 2)
      return run_prefill(static_cast<int>(number(2, 0)), number(3, 10), static_cast<int>(number(4, 4)), static_cast<int>(number(5, 1900)));
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_server: {}\n", error.what());
    return 1;
  }
  fmt::print(stderr, "usage: bench_server streams|requests|disconnects|prefill [numbers]\n");
  return 2;
}
