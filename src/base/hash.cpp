// xxHash, compiled in.
#include "base/hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace cachalot {

uint64_t xxh3(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

struct Xxh3::State {
  XXH3_state_t xxh;
};

Xxh3::Xxh3() : state_(std::make_unique<State>()) { reset(); }
Xxh3::~Xxh3() = default;
void Xxh3::add(std::span<const std::byte> bytes) { XXH3_64bits_update(&state_->xxh, bytes.data(), bytes.size()); }
uint64_t Xxh3::value() const { return XXH3_64bits_digest(&state_->xxh); }
void Xxh3::reset() { XXH3_64bits_reset(&state_->xxh); }

}  // namespace cachalot
