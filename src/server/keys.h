// Who may ask, and how much: API keys with their limits.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "cachalot/engine.h"
#include "server/exchange.h"

namespace cachalot::server {

// Refills steadily up to one minute's worth.
class TokenBucket {
 public:
  explicit TokenBucket(double per_minute) : per_minute_(per_minute), level_(per_minute) {}
  // Takes `amount`, or nothing when less than `needed` is there. Returns the seconds until there is enough, 0 when taken.
  double take(double amount, double needed, Clock::time_point now);

 private:
  const double per_minute_;  // 0: no limit
  double level_;
  Clock::time_point last_{};
};

struct ClientKey {
  std::string name;                                       // for logs; never the key itself
  std::array<unsigned char, 32> digest;                   // SHA-256 of the key
  double requests_per_minute = 0, tokens_per_minute = 0;  // 0: no limit
  int max_running = 0;                                    // requests at the same time; 0: no limit
  Priority most_urgent = Priority::interactive;           // more urgent wishes are lowered to it

  struct Use {
    Use(double requests, double tokens) : request_bucket(requests), token_bucket(tokens) {}
    std::mutex mutex;
    TokenBucket request_bucket, token_bucket;
    std::atomic<int> running{0};
  };
  std::unique_ptr<Use> use;
};

class KeyRing {
 public:
  // One key a line: KEY [name=TEXT] [rpm=N] [tpm=N] [running=N] [class=P0|P1|P2]; '#' begins a comment. Throws Error naming source and
  // line.
  void add(std::string_view text, const std::string& source);
  [[nodiscard]] bool empty() const { return keys_.empty(); }
  // Takes the same time for every wrong key of one length. Null when there is none such.
  [[nodiscard]] const ClientKey* find(std::string_view key) const;

 private:
  std::vector<std::unique_ptr<ClientKey>> keys_;
};

// Counts a request of `n` answers; throws ApiError 429 with Retry-After when the key has used up what it may. release() when it ended.
void admit(const ClientKey& key, int n);
void release(const ClientKey& key, int n, int tokens);

}  // namespace cachalot::server
