// One connection: requests are read and answered one after the other. Lives on one I/O thread.
#pragma once

#include <array>
#include <atomic>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/beast/core/buffers_range.hpp>
#include <boost/beast/http/parser.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "server/http_server.h"

namespace cachalot::server {

namespace asio = boost::asio;
namespace beast = boost::beast;
using Socket = asio::generic::stream_protocol::socket;

class Connection;

// What the connections of one I/O thread share; touched by that thread alone, but for the counters.
struct IoThread {
  explicit IoThread(int number) : index(number) {}
  int index;
  asio::io_context context{1};
  std::unordered_set<Connection*> connections;
  std::vector<std::shared_ptr<Connection>> dirty;  // with something to send
  bool flush_posted = false;

  void flush();
};

struct ConnectionShared {
  explicit ConnectionShared(HttpOptions http_options) : options(std::move(http_options)), bodies(options.max_bodies_bytes) {}
  HttpOptions options;
  BodyBudget bodies;
  HttpServer::HeaderCheck check;
  HttpServer::Handler handler;
  bool loopback = false;
  std::atomic<bool> draining{false};
  std::atomic<int64_t> connections{0}, accepted{0}, lost{0}, slow_readers{0};
  std::array<std::atomic<int64_t>, 6> answers{};  // by hundreds of the status; but for those that are counted elsewhere
};

// A body that grows with what really arrives: a header that promises much costs nothing.
struct GrowingBody {
  using value_type = CountedBody;
  class reader {
   public:
    template <bool isRequest, class Fields>
    reader(beast::http::header<isRequest, Fields>&, value_type& body) : body_(body) {}
    void init(const boost::optional<std::uint64_t>&, beast::error_code& ec) { ec = {}; }
    template <class Buffers>
    size_t put(const Buffers& buffers, beast::error_code& ec) {
      ec = {};
      size_t n = 0;
      for (const asio::const_buffer buffer : beast::buffers_range_ref(buffers)) {
        if (!body_.append({static_cast<const char*>(buffer.data()), buffer.size()})) {
          ec = beast::http::error::buffer_overflow;
          return n;
        }
        n += buffer.size();
      }
      return n;
    }
    void finish(beast::error_code& ec) { ec = {}; }

   private:
    value_type& body_;
  };
};

class ConnectionExchange;

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(ConnectionShared& shared, IoThread& io, std::string client);
  virtual ~Connection();

  virtual void begin() = 0;  // the handshake, if there is one; then read()
  void sweep(Clock::time_point now);
  void close();
  void flush();

 protected:
  // The ways to the socket. read_some and write_later complete in on_read and on_written; write_now returns the bytes that went out at
  // once, with would_block when it cannot. write_later either waits until writing is possible, or sends what take_output() gives it.
  virtual void read_some(char* data, size_t size) = 0;
  virtual size_t write_now(const char* data, size_t size, beast::error_code& error) = 0;
  virtual void write_later() = 0;
  virtual void end_output() = 0;  // the client sees the end, and may still send
  virtual void close_socket() = 0;

  void read();
  void on_read(beast::error_code error, size_t size);
  void on_written(beast::error_code error, size_t size);
  void take_output();  // moves what is to be sent to in_flight_

  std::string in_flight_;  // being written by write_later, where the stream needs the bytes to stay in place

 private:
  friend class ConnectionExchange;
  enum class Phase : uint8_t { reading, answering, lingering, closed };

  void pump();
  void take_header();
  void dispatch();
  void refuse(const ApiError& error);
  void lose(bool slow);
  void mark_dirty();
  void send_head(int status, std::string_view content_type, const std::vector<std::pair<std::string, std::string>>& headers,
                 int64_t length);
  void frame_body();
  void finish_response();
  [[nodiscard]] size_t pending() const { return out_.size() - sent_ + in_flight_.size() + body_.size(); }

  ConnectionShared& shared_;
  IoThread& io_;
  const std::string client_;
  Phase phase_ = Phase::reading;
  std::unique_ptr<char[]> read_buffer_;  // of the read that is pending
  size_t read_size_ = 0;
  std::string in_;  // read and not parsed yet
  std::unique_ptr<beast::http::request_parser<GrowingBody>> parser_;
  bool read_pending_ = false, header_taken_ = false, pumping_ = false, saw_bytes_ = false;
  bool unread_input_ = false;  // the request was refused before its end
  HttpRequest request_;

  std::shared_ptr<ConnectionExchange> exchange_;  // of the request being answered
  bool keep_alive_ = false, http10_ = false, head_only_ = false, chunked_ = false, streaming_ = false, response_done_ = false;
  std::string origin_;  // to be allowed, when it is

  std::string body_;  // of a stream, not framed yet
  std::string out_;   // framed
  size_t sent_ = 0;   // of out_
  bool dirty_ = false, writing_ = false;
  Clock::time_point last_progress_, phase_began_, last_write_;
  std::string keep_alive_text_;
};

// The exchange of one request: lives as long as somebody answers it, and reaches the connection only while the request is current.
class ConnectionExchange : public Exchange {
 public:
  explicit ConnectionExchange(Connection& connection, IoThread& io) : connection_(&connection), io_(io) {}

  void respond(HttpResponse response) override;
  void begin_stream(std::string_view content_type) override;
  void write(std::string_view bytes) override;
  void end_stream() override;
  void keep_alive(std::string_view bytes) override;
  void on_closed(std::function<void()> f) override { closed_ = std::move(f); }
  void post(std::function<void()> f) override;
  [[nodiscard]] bool alive() const override { return connection_ != nullptr; }
  [[nodiscard]] int io_thread() const override { return io_.index; }

 private:
  friend class Connection;
  Connection* connection_;  // null once the answer is complete or the connection gone
  IoThread& io_;
  std::function<void()> closed_;
};

}  // namespace cachalot::server
