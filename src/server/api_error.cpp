// Error bodies.
#include "server/api_error.h"

#include "server/json_writer.h"

namespace cachalot::server {
namespace {

const char* openai_type(int status) {
  switch (status) {
    case 401: return "authentication_error";
    case 403: return "permission_error";
    case 404: return "not_found_error";
    case 429: return "rate_limit_error";
    case 501: return "not_supported_error";
    case 503: return "unavailable_error";
    case 504: return "timeout_error";
    default: return status >= 500 ? "server_error" : "invalid_request_error";
  }
}

const char* anthropic_type(int status) {
  switch (status) {
    case 401: return "authentication_error";
    case 403: return "permission_error";
    case 404: return "not_found_error";
    case 413: return "request_too_large";
    case 429: return "rate_limit_error";
    case 503: return "overloaded_error";
    case 408:
    case 504: return "timeout_error";
    default: return status >= 500 ? "api_error" : "invalid_request_error";
  }
}

void string_or_null(JsonWriter& json, std::string_view name, const std::string& text) {
  json.key(name);
  if (text.empty())
    json.null();
  else
    json.value(text);
}

}  // namespace

std::string error_body(const ApiError& error, ApiStyle style, const std::string& request_id) {
  std::string out;
  JsonWriter json(out);
  json.begin_object();
  if (style == ApiStyle::anthropic) {
    json.field("type", "error").key("error").begin_object();
    json.field("type", anthropic_type(error.status)).field("message", error.what());
    json.end_object().field("request_id", request_id);
  } else {
    json.key("error").begin_object();
    json.field("message", error.what()).field("type", openai_type(error.status));
    string_or_null(json, "param", error.param);
    string_or_null(json, "code", error.code);
    json.end_object();
  }
  json.end_object();
  return out;
}

}  // namespace cachalot::server
