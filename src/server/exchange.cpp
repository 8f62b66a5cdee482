// Answers that are errors.
#include "server/exchange.h"

#include <cmath>

namespace cachalot::server {

void Exchange::respond_error(const ApiError& error) {
  HttpResponse response{.status = error.status, .body = error_body(error, style, request_id)};
  if (error.retry_after_seconds > 0.0)
    response.headers.emplace_back("Retry-After", std::to_string(static_cast<int>(std::ceil(error.retry_after_seconds))));
  if (error.status == 401) response.headers.emplace_back("WWW-Authenticate", "Bearer");
  respond(std::move(response));
}

}  // namespace cachalot::server
