// JsonLog on spdlog's asynchronous logger.
#include "server/json_log.h"

#include <fmt/chrono.h>
#include <spdlog/async.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>

#include <chrono>

#include "base/error.h"

namespace cachalot::server {

struct JsonLog::Sink {
  std::shared_ptr<spdlog::async_logger> logger;
  // Last, so that it is joined before what it writes to goes.
  std::shared_ptr<spdlog::details::thread_pool> thread = std::make_shared<spdlog::details::thread_pool>(8192, 1);
};

JsonLog::JsonLog(LogLevel least, const std::string& path) : least_(least), sink_(std::make_unique<Sink>()) {
  spdlog::sink_ptr sink;
  try {
    if (path.empty())
      sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
    else
      sink = std::make_shared<spdlog::sinks::basic_file_sink_mt>(path);
  } catch (const spdlog::spdlog_ex& error) {
    fail("--log-file {}: {}", path, error.what());
  }
  sink_->logger = std::make_shared<spdlog::async_logger>("cachalot", sink, sink_->thread, spdlog::async_overflow_policy::overrun_oldest);
  sink_->logger->set_pattern("%v");
  sink_->logger->flush_on(spdlog::level::info);
}

JsonLog::~JsonLog() = default;

void JsonLog::write(LogLevel level, std::string_view event, const std::function<void(JsonWriter&)>& fields) {
  if (!wants(level)) return;
  constexpr const char* kNames[] = {"debug", "info", "warning", "error", "off"};
  const auto now = std::chrono::system_clock::now();
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count();
  std::string line;
  JsonWriter json(line);
  json.begin_object();
  json.field("time", fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03}Z", fmt::gmtime(static_cast<std::time_t>(ms / 1000)), ms % 1000));
  json.field("level", kNames[static_cast<size_t>(level)]).field("event", event);
  if (fields) fields(json);
  json.end_object();
  sink_->logger->log(spdlog::level::info, line);
}

}  // namespace cachalot::server
