// XXH3-64: a fast hash that notices damage (it does not withstand forgery).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace cachalot {

uint64_t xxh3(std::span<const std::byte> bytes);

// The same of bytes that come in pieces.
class Xxh3 {
 public:
  Xxh3();
  ~Xxh3();
  Xxh3(const Xxh3&) = delete;
  Xxh3& operator=(const Xxh3&) = delete;

  void add(std::span<const std::byte> bytes);
  [[nodiscard]] uint64_t value() const;
  void reset();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace cachalot
