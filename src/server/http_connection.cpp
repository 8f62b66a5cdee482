// The state machine of a connection.
#include "server/http_connection.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <charconv>

namespace cachalot::server {
namespace {

namespace http = beast::http;

constexpr size_t kReadSize = 4096, kBodyReadSize = 65536;
constexpr size_t kAheadSize = 512;   // read while answering, to see a client go away
constexpr size_t kMaxAhead = 16384;  // of the next request, while this one is answered
constexpr double kLingerSeconds = 2.0;
constexpr size_t kKeptCapacity = 4096;  // of an idle buffer

const char* reason_phrase(int status) {
  switch (status) {
    case 200: return "OK";
    case 204: return "No Content";
    case 400: return "Bad Request";
    case 401: return "Unauthorized";
    case 403: return "Forbidden";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 408: return "Request Timeout";
    case 413: return "Payload Too Large";
    case 415: return "Unsupported Media Type";
    case 417: return "Expectation Failed";
    case 429: return "Too Many Requests";
    case 431: return "Request Header Fields Too Large";
    case 501: return "Not Implemented";
    case 503: return "Service Unavailable";
    case 504: return "Gateway Timeout";
    default: return status >= 500 ? "Internal Server Error" : "Error";
  }
}

double seconds_between(Clock::time_point from, Clock::time_point to) { return std::chrono::duration<double>(to - from).count(); }

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

// An id from outside ends up in headers and logs: only what is harmless there.
bool good_request_id(std::string_view id) {
  return !id.empty() && id.size() <= 128 &&
         std::all_of(id.begin(), id.end(), [](unsigned char c) { return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.'; });
}

std::string fresh_request_id() {
  static std::atomic<uint64_t> next{static_cast<uint64_t>(Clock::now().time_since_epoch().count())};
  // A counter behind a multiplier that is odd, so that ids of one server never repeat and do not look alike.
  return fmt::format("req_{:016x}", next.fetch_add(1) * 0x9e3779b97f4a7c15u);
}

std::string_view host_name(std::string_view host) {
  if (host.starts_with('[')) return host.substr(0, host.find(']') + 1);
  return host.substr(0, host.rfind(':'));
}

void check_host(const ConnectionShared& shared, std::string_view host) {
  const auto& allowed = shared.options.allowed_hosts;
  const std::string name = lower(host_name(host));
  // A page of another site whose name was pointed at 127.0.0.1 still says its own name here.
  const bool local = name == "localhost" || name == "127.0.0.1" || name == "[::1]" || name.ends_with(".localhost");
  if (std::find(allowed.begin(), allowed.end(), name) != allowed.end()) return;
  if ((allowed.empty() && !shared.loopback) || (shared.loopback && local)) return;
  throw ApiError(403, "The Host header names a host that this server does not answer for (--allowed-hosts)");
}

ApiError no_room() {
  ApiError error(503, "The server holds as much of other requests as it may; try again soon", "", "bodies_full");
  error.retry_after_seconds = 1.0;
  return error;
}

ApiError parse_error(const beast::error_code& error) {
  if (error == http::error::buffer_overflow) return no_room();
  if (error == http::error::body_limit) return {413, "The request body is larger than the server allows"};
  if (error == http::error::header_limit) return {431, "The request header is larger than the server allows"};
  return {400, "The request is not valid HTTP: " + error.message()};
}

}  // namespace

void IoThread::flush() {
  flush_posted = false;
  // A flush may end a request, whose successor may write at once.
  std::vector<std::shared_ptr<Connection>> now;
  now.swap(dirty);
  for (const auto& connection : now) connection->flush();
  now.clear();
  if (dirty.empty()) dirty.swap(now);  // keeps the memory
}

Connection::Connection(ConnectionShared& shared, IoThread& io, std::string client)
    : shared_(shared),
      io_(io),
      client_(std::move(client)),
      last_progress_(Clock::now()),
      phase_began_(last_progress_),
      last_write_(last_progress_) {
  io_.connections.insert(this);
  shared_.connections.fetch_add(1, std::memory_order_relaxed);
}

Connection::~Connection() {
  io_.connections.erase(this);
  shared_.connections.fetch_sub(1, std::memory_order_relaxed);
}

void Connection::read() {
  if (read_pending_ || phase_ == Phase::closed) return;
  size_t size = kReadSize;
  if (phase_ == Phase::answering) {
    if (in_.size() >= kMaxAhead) return;
    size = kAheadSize;
  } else if (header_taken_) {
    size = kBodyReadSize;
  }
  read_pending_ = true;
  if (read_size_ != size) read_buffer_.reset(new char[size]);
  read_size_ = size;
  read_some(read_buffer_.get(), size);
}

void Connection::on_read(beast::error_code error, size_t size) {
  read_pending_ = false;
  if (phase_ == Phase::closed) return;
  if (error) {
    // A client that has all but the answer's last bytes to wait for may have closed its own side.
    if (phase_ == Phase::answering && error == asio::error::eof && response_done_)
      keep_alive_ = false;
    else if (phase_ != Phase::answering)
      close();
    else
      lose(false);
    return;
  }
  last_progress_ = Clock::now();
  if (phase_ != Phase::lingering) in_.append(read_buffer_.get(), size);
  if (phase_ == Phase::reading) pump();
  read();
}

// Feeds what was read to the parser; answers as many requests as are complete.
void Connection::pump() {
  if (pumping_) return;
  pumping_ = true;
  while (phase_ == Phase::reading && !in_.empty()) {
    if (!parser_) {
      parser_ = std::make_unique<http::request_parser<GrowingBody>>();
      parser_->get().body() = CountedBody(shared_.bodies);
      parser_->eager(true);
      parser_->header_limit(static_cast<std::uint32_t>(shared_.options.max_header_bytes));
      parser_->body_limit(shared_.options.max_body_bytes);
      header_taken_ = false;
      phase_began_ = Clock::now();
      saw_bytes_ = true;
    }
    beast::error_code error;
    // Header first and alone: it decides whether the body is wanted at all.
    parser_->eager(header_taken_);
    const size_t used = parser_->put(asio::buffer(in_), error);
    in_.erase(0, used);
    if (error == http::error::need_more) error = {};
    if (error) {
      refuse(parse_error(error));
      break;
    }
    if (parser_->is_header_done() && !header_taken_) {
      header_taken_ = true;
      try {
        take_header();
      } catch (const ApiError& refused) {
        refuse(refused);
        break;
      }
      if (phase_ != Phase::reading) break;
      if (!parser_->is_done()) continue;
    }
    if (parser_->is_done()) {
      dispatch();
      continue;
    }
    if (used == 0) {
      if (in_.size() > shared_.options.max_header_bytes + kBodyReadSize)
        refuse(ApiError(431, "The request header is larger than the server allows"));
      break;
    }
  }
  pumping_ = false;
}

void Connection::take_header() {
  const auto& message = parser_->get();
  request_ = {};
  for (const auto& field : message) {
    if (request_.headers.size() >= static_cast<size_t>(shared_.options.max_headers))
      throw ApiError(431, "The request has more header fields than the server allows");
    request_.headers.emplace_back(lower({field.name_string().data(), field.name_string().size()}), std::string(field.value()));
  }
  request_.method = std::string(message.method_string());
  const std::string target(message.target());
  http10_ = message.version() == 10;
  head_only_ = request_.method == "HEAD";
  keep_alive_ = parser_->keep_alive() && !shared_.draining;
  origin_.clear();

  exchange_ = std::make_shared<ConnectionExchange>(*this, io_);
  exchange_->client = client_;
  const std::string_view id = request_.header("x-request-id");
  exchange_->request_id = good_request_id(id) ? std::string(id) : fresh_request_id();

  if (message.version() != 10 && message.version() != 11) throw ApiError(400, "Only HTTP/1.0 and HTTP/1.1 are spoken here");
  if (target.empty() || (target[0] != '/' && !(target == "*" && request_.method == "OPTIONS")) || target.find('#') != std::string::npos)
    throw ApiError(400, "The request target must be a path");
  const size_t question = target.find('?');
  request_.path = target.substr(0, question);
  if (question != std::string::npos) request_.query = target.substr(question + 1);

  int hosts = 0, lengths = 0, encodings = 0;
  for (const auto& [name, value] : request_.headers) {
    hosts += name == "host";
    lengths += name == "content-length";
    encodings += name == "transfer-encoding";
  }
  // Two readers that disagree about where a body ends are a way to smuggle requests.
  if (encodings > 0 && (lengths > 0 || encodings > 1 || lower(request_.header("transfer-encoding")) != "chunked" || http10_))
    throw ApiError(400, "The request names the length of its body in two ways, or in one that is not spoken here");
  if (hosts > 1 || (hosts == 0 && !http10_)) throw ApiError(400, "The request needs one Host header");
  if (hosts == 1) check_host(shared_, request_.header("host"));

  const std::string_view origin = request_.header("origin");
  for (const std::string& allowed : shared_.options.cors_origins)
    if (!origin.empty() && (allowed == "*" || allowed == origin)) origin_ = allowed == "*" ? "*" : std::string(origin);
  if (request_.method == "OPTIONS" && !origin_.empty()) return;  // a preflight comes without the key

  shared_.check(*exchange_, request_);
  // What does not fit is better refused before it is sent. What is promised is not counted, only what comes.
  if (const auto length = parser_->content_length_remaining(); length && *length > shared_.bodies.free()) throw no_room();
  const std::string expect = lower(request_.header("expect"));
  if (expect == "100-continue" && !parser_->is_done()) {
    out_ += "HTTP/1.1 100 Continue\r\n\r\n";
    mark_dirty();
  } else if (!expect.empty() && expect != "100-continue") {
    throw ApiError(417, "The only expectation that can be met is 100-continue");
  }
}

void Connection::dispatch() {
  request_.body = std::move(parser_->get().body());
  parser_.reset();
  phase_ = Phase::answering;
  phase_began_ = Clock::now();
  response_done_ = streaming_ = chunked_ = false;
  if (in_.empty()) std::string().swap(in_);
  const auto exchange = exchange_;
  if (request_.method == "OPTIONS" && !origin_.empty()) {
    exchange->respond(
        {.status = 204,
         .body = {},
         .headers = {{"Access-Control-Allow-Methods", "GET, POST, OPTIONS"},
                     {"Access-Control-Allow-Headers", "authorization, content-type, x-api-key, x-request-id, anthropic-version"},
                     {"Access-Control-Max-Age", "600"}}});
    return;
  }
  HttpRequest request = std::move(request_);
  request_ = {};
  try {
    shared_.handler(exchange, std::move(request));
  } catch (const ApiError& error) {
    exchange->respond_error(error);
  } catch (const std::exception& error) {
    exchange->respond_error(ApiError(500, error.what()));
  }
}

// Answers what was not read to its end, and hangs up.
void Connection::refuse(const ApiError& error) {
  if (!exchange_) {
    exchange_ = std::make_shared<ConnectionExchange>(*this, io_);
    exchange_->request_id = fresh_request_id();
  }
  // With all of the request in hand the connection can go on.
  const bool whole = parser_ && parser_->is_done();
  // Bytes that are no good HTTP may have been meant as anything.
  const bool broken = error.status == 400 || error.status == 413 || error.status == 431;
  keep_alive_ = keep_alive_ && whole && !broken;
  unread_input_ = !whole;
  parser_.reset();
  phase_ = Phase::answering;
  response_done_ = streaming_ = chunked_ = false;
  const auto exchange = exchange_;
  exchange->respond_error(error);
}

void Connection::send_head(int status, std::string_view content_type, const std::vector<std::pair<std::string, std::string>>& headers,
                           int64_t length) {
  if (shared_.draining) keep_alive_ = false;
  if (!exchange_->counted) shared_.answers[static_cast<size_t>(status / 100)].fetch_add(1, std::memory_order_relaxed);
  out_ += fmt::format("HTTP/1.1 {} {}\r\n", status, reason_phrase(status));
  if (!content_type.empty()) out_ += fmt::format("Content-Type: {}\r\n", content_type);
  if (length >= 0) {
    out_ += fmt::format("Content-Length: {}\r\n", length);
  } else if (!http10_) {
    chunked_ = true;
    out_ += "Transfer-Encoding: chunked\r\n";
  } else {
    keep_alive_ = false;
  }
  out_ += "X-Request-Id: ";
  out_ += exchange_->request_id;
  out_ += "\r\n";
  if (!origin_.empty()) {
    out_ += fmt::format("Access-Control-Allow-Origin: {}\r\nAccess-Control-Expose-Headers: x-request-id\r\n", origin_);
    if (origin_ != "*") out_ += "Vary: Origin\r\n";
  }
  for (const auto& [name, value] : headers) out_ += fmt::format("{}: {}\r\n", name, value);
  out_ += keep_alive_ ? (http10_ ? "Connection: keep-alive\r\n\r\n" : "\r\n") : "Connection: close\r\n\r\n";
}

void Connection::frame_body() {
  if (body_.empty()) return;
  if (chunked_) {
    char size[16];
    const auto end = std::to_chars(size, size + sizeof size, body_.size(), 16).ptr;
    out_.append(size, end);
    out_ += "\r\n";
    out_ += body_;
    out_ += "\r\n";
  } else {
    out_ += body_;
  }
  body_.clear();
}

void Connection::mark_dirty() {
  if (dirty_ || phase_ == Phase::closed) return;
  dirty_ = true;
  io_.dirty.push_back(shared_from_this());
  if (io_.flush_posted) return;
  io_.flush_posted = true;
  asio::post(io_.context, [&io = io_] { io.flush(); });
}

void Connection::flush() {
  dirty_ = false;
  if (phase_ == Phase::closed) return;
  frame_body();
  if (writing_) {
    if (streaming_ && pending() > shared_.options.max_output_bytes) lose(true);
    return;
  }
  while (sent_ < out_.size()) {
    beast::error_code error;
    const size_t n = write_now(out_.data() + sent_, out_.size() - sent_, error);
    sent_ += n;
    if (n > 0) last_progress_ = last_write_ = Clock::now();
    if (error == asio::error::would_block || error == asio::error::try_again) {
      if (streaming_ && out_.size() - sent_ > shared_.options.max_output_bytes) {
        lose(true);
        return;
      }
      writing_ = true;
      write_later();
      return;
    }
    if (error) {
      lose(false);
      return;
    }
  }
  out_.clear();
  sent_ = 0;
  if (out_.capacity() > kKeptCapacity) std::string().swap(out_);
  if (body_.capacity() > kKeptCapacity && body_.empty()) std::string().swap(body_);
  if (response_done_) finish_response();
}

void Connection::on_written(beast::error_code error, size_t size) {
  writing_ = false;
  if (phase_ == Phase::closed) return;
  if (error) {
    lose(false);
    return;
  }
  if (size > 0) last_progress_ = last_write_ = Clock::now();
  in_flight_.clear();
  flush();
}

void Connection::take_output() {
  in_flight_ = sent_ == 0 ? std::move(out_) : out_.substr(sent_);
  out_.clear();
  sent_ = 0;
}

// The last byte of an answer is out.
void Connection::finish_response() {
  response_done_ = streaming_ = chunked_ = false;
  keep_alive_text_.clear();
  exchange_.reset();
  if (!keep_alive_) {
    if (!unread_input_) {
      close();
      return;
    }
    // Closing on bytes that nobody read makes the kernel reset the connection, and the client loses the answer: they are read and dropped.
    phase_ = Phase::lingering;
    phase_began_ = Clock::now();
    in_.clear();
    end_output();
    if (!pumping_) read();
    return;
  }
  phase_ = Phase::reading;
  header_taken_ = saw_bytes_ = false;
  phase_began_ = last_progress_ = Clock::now();
  if (pumping_) return;
  pump();
  read();
}

void Connection::lose(bool slow) {
  if (phase_ == Phase::closed) return;
  (slow ? shared_.slow_readers : shared_.lost).fetch_add(1, std::memory_order_relaxed);
  close();
}

void Connection::close() {
  if (phase_ == Phase::closed) return;
  const auto self = shared_from_this();
  phase_ = Phase::closed;
  close_socket();
  const auto exchange = std::move(exchange_);
  if (!exchange) return;
  exchange->connection_ = nullptr;
  if (const auto closed = std::move(exchange->closed_)) closed();
}

void Connection::sweep(Clock::time_point now) {
  const HttpOptions& options = shared_.options;
  const auto self = shared_from_this();
  if (phase_ == Phase::reading) {
    if (!saw_bytes_) {
      if (seconds_between(last_progress_, now) > options.idle_seconds || shared_.draining) close();
    } else if (!header_taken_ ? seconds_between(phase_began_, now) > options.header_seconds
                              : seconds_between(last_progress_, now) > options.body_seconds) {
      keep_alive_ = false;
      refuse(ApiError(408, "The request did not arrive in time"));
    }
    return;
  }
  if (phase_ == Phase::lingering && seconds_between(phase_began_, now) > kLingerSeconds) close();
  if (phase_ != Phase::answering) return;
  if (pending() > 0) {
    if (seconds_between(last_write_, now) > options.write_seconds && seconds_between(phase_began_, now) > options.write_seconds) lose(true);
  } else if (streaming_ && !keep_alive_text_.empty() && seconds_between(last_write_, now) >= options.keep_alive_seconds) {
    body_ += keep_alive_text_;
    mark_dirty();
  }
}

void ConnectionExchange::respond(HttpResponse response) {
  Connection* c = connection_;
  if (c == nullptr) return;
  const auto self = shared_from_this();
  c->send_head(response.status, response.body.empty() && response.status == 204 ? "" : response.content_type, response.headers,
               static_cast<int64_t>(response.body.size()));
  if (!c->head_only_) c->out_ += response.body;
  c->last_write_ = Clock::now();
  c->response_done_ = true;
  connection_ = nullptr;
  closed_ = nullptr;
  c->mark_dirty();
}

void ConnectionExchange::begin_stream(std::string_view content_type) {
  Connection* c = connection_;
  if (c == nullptr) return;
  // Buffering proxies would hold back what is meant to be seen at once.
  c->send_head(200, content_type, {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}}, -1);
  c->streaming_ = true;
  c->last_write_ = Clock::now();
  c->mark_dirty();
}

void ConnectionExchange::write(std::string_view bytes) {
  if (connection_ == nullptr || bytes.empty()) return;
  connection_->body_ += bytes;
  connection_->mark_dirty();
}

void ConnectionExchange::end_stream() {
  Connection* c = connection_;
  if (c == nullptr) return;
  const auto self = shared_from_this();
  c->frame_body();
  if (c->chunked_) c->out_ += "0\r\n\r\n";
  c->response_done_ = true;
  connection_ = nullptr;
  closed_ = nullptr;
  c->mark_dirty();
}

void ConnectionExchange::keep_alive(std::string_view bytes) {
  if (connection_ != nullptr) connection_->keep_alive_text_ = bytes;
}

void ConnectionExchange::post(std::function<void()> f) { asio::post(io_.context, std::move(f)); }

}  // namespace cachalot::server
