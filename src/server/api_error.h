// ApiError: why a request is answered with an error, and the two forms in which clients expect to read it.
#pragma once

#include <stdexcept>
#include <string>

namespace cachalot::server {

class ApiError : public std::runtime_error {
 public:
  // `param` names the field at fault, `code` a machine-readable reason; both may be empty.
  ApiError(int http_status, const std::string& message, std::string at_param = "", std::string reason_code = "")
      : std::runtime_error(message), status(http_status), param(std::move(at_param)), code(std::move(reason_code)) {}

  int status;
  std::string param, code;
  double retry_after_seconds = 0.0;  // of a 429 or 503; 0: not told
};

enum class ApiStyle : uint8_t { openai, anthropic };

// A whole JSON body: OpenAI's {"error":{message,type,param,code}} or Anthropic's {"type":"error","error":{type,message},"request_id"}.
std::string error_body(const ApiError& error, ApiStyle style, const std::string& request_id);

}  // namespace cachalot::server
