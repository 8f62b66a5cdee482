// One JSON object a line, on the standard error or into a file. Never waits for the reader: when it is too slow, the oldest lines are lost.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "server/json_writer.h"

namespace cachalot::server {

enum class LogLevel : uint8_t { debug, info, warning, error, off };

class JsonLog {
 public:
  // An empty path: the standard error. Throws Error for a file that cannot be opened.
  JsonLog(LogLevel least, const std::string& path);
  ~JsonLog();  // writes what is waiting

  // {"time": ..., "level": ..., "event": event, fields...}. Any thread.
  void write(LogLevel level, std::string_view event, const std::function<void(JsonWriter&)>& fields = {});
  [[nodiscard]] bool wants(LogLevel level) const { return level >= least_; }

 private:
  struct Sink;
  LogLevel least_;
  std::unique_ptr<Sink> sink_;
};

}  // namespace cachalot::server
