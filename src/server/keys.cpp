// KeyRing and the limits of a key.
#include "server/keys.h"

#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <algorithm>
#include <charconv>

#include "base/error.h"

namespace cachalot::server {
namespace {

std::array<unsigned char, 32> digest_of(std::string_view key) {
  std::array<unsigned char, 32> out{};
  SHA256(reinterpret_cast<const unsigned char*>(key.data()), key.size(), out.data());
  return out;
}

std::vector<std::string_view> words_of(std::string_view line) {
  std::vector<std::string_view> words;
  for (size_t at = 0; (at = line.find_first_not_of(" \t\r", at)) != std::string_view::npos;) {
    const size_t end = std::min(line.find_first_of(" \t\r", at), line.size());
    words.push_back(line.substr(at, end - at));
    at = end;
  }
  return words;
}

void set_option(ClientKey& key, std::string_view word, const std::string& where) {
  const size_t equals = word.find('=');
  const std::string_view name = word.substr(0, equals), value = equals == std::string_view::npos ? "" : word.substr(equals + 1);
  if (name == "name" && !value.empty()) {
    key.name = value;
    return;
  }
  if (name == "class" && value.size() == 2 && value[0] == 'P' && value[1] >= '0' && value[1] <= '2') {
    key.most_urgent = static_cast<Priority>(value[1] - '0');
    return;
  }
  int number = -1;
  const auto read = std::from_chars(value.data(), value.data() + value.size(), number);
  const bool good = read.ec == std::errc() && read.ptr == value.data() + value.size() && number >= 0;
  if (good && name == "rpm")
    key.requests_per_minute = number;
  else if (good && name == "tpm")
    key.tokens_per_minute = number;
  else if (good && name == "running")
    key.max_running = number;
  else
    fail("{}: found \"{}\", expected name=TEXT, rpm=N, tpm=N, running=N or class=P0|P1|P2", where, printable(word, 40));
}

ApiError limit_error(const std::string& message, double seconds) {
  ApiError error(429, message, "", "rate_limit_exceeded");
  error.retry_after_seconds = std::max(seconds, 1.0);
  return error;
}

}  // namespace

double TokenBucket::take(double amount, double needed, Clock::time_point now) {
  if (per_minute_ <= 0.0) return 0.0;
  if (last_ != Clock::time_point{})
    level_ = std::min(per_minute_, level_ + std::chrono::duration<double>(now - last_).count() * per_minute_ / 60.0);
  last_ = now;
  if (level_ < needed) return (needed - level_) * 60.0 / per_minute_;
  level_ -= amount;
  return 0.0;
}

void KeyRing::add(std::string_view text, const std::string& source) {
  int number = 0;
  const size_t before = keys_.size();
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    ++number;
    auto words = words_of(line);
    // A comment begins a word: keys may hold the character.
    words.erase(std::find_if(words.begin(), words.end(), [](std::string_view word) { return word[0] == '#'; }), words.end());
    if (words.empty()) continue;
    auto key = std::make_unique<ClientKey>();
    key->digest = digest_of(words[0]);
    key->name = fmt::format("key{}", keys_.size() + 1);
    for (size_t i = 1; i < words.size(); ++i) set_option(*key, words[i], fmt::format("{}, line {}", source, number));
    key->use = std::make_unique<ClientKey::Use>(key->requests_per_minute, key->tokens_per_minute);
    keys_.push_back(std::move(key));
  }
  // A ring without keys protects nothing.
  if (keys_.size() == before) fail("{}: found no key", source);
}

const ClientKey* KeyRing::find(std::string_view key) const {
  const auto digest = digest_of(key);
  const ClientKey* found = nullptr;
  // All are compared, whichever fits.
  for (const auto& known : keys_)
    if (CRYPTO_memcmp(known->digest.data(), digest.data(), digest.size()) == 0) found = known.get();
  return found;
}

void admit(const ClientKey& key, int n) {
  ClientKey::Use& use = *key.use;
  if (key.max_running > 0 && use.running.fetch_add(n) + n > key.max_running) {
    use.running.fetch_sub(n);
    throw limit_error(fmt::format("This key may run {} requests at the same time", key.max_running), 1.0);
  }
  const std::lock_guard lock(use.mutex);
  const auto now = Clock::now();
  double wait = use.token_bucket.take(0.0, 1.0, now);  // tokens are counted once it is known how many
  if (wait <= 0.0) wait = use.request_bucket.take(n, n, now);
  if (wait <= 0.0) return;
  if (key.max_running > 0) use.running.fetch_sub(n);
  throw limit_error("This key has used up its requests or tokens of this minute", wait);
}

void release(const ClientKey& key, int n, int tokens) {
  ClientKey::Use& use = *key.use;
  if (key.max_running > 0) use.running.fetch_sub(n);
  const std::lock_guard lock(use.mutex);
  use.token_bucket.take(tokens, -1e18, Clock::now());  // may go below zero: then the next requests wait
}

}  // namespace cachalot::server
