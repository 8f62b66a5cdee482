// Bpe: merges found in a flat hash table; long pieces through a heap over a linked list.
#include "text/bpe.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <queue>

#include "base/check.h"
#include "text/unicode.h"

namespace cachalot {
namespace {

// Below this a scan of all pairs for each merge beats the heap.
constexpr size_t kShort = 48;

uint64_t pair_of(int left, int right) { return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right); }

}  // namespace

Bpe::Bpe(size_t n_merges) {
  CACHALOT_CHECK(n_merges <= kMaxMerges);
  merges_.reserve(n_merges);
  slots_.resize(std::bit_ceil(std::max<size_t>(16, 2 * n_merges)));
  shift_ = 64 - std::countr_zero(slots_.size());
  byte_ids_.fill(-1);
}

size_t Bpe::slot_of(uint64_t pair) const {
  const uint64_t mixed = (pair ^ pair >> 29) * 0x9E3779B97F4A7C15ull;
  size_t slot = static_cast<size_t>((mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93ull >> shift_);
  while (slots_[slot].pair != pair && slots_[slot].rank != kNoRank) slot = (slot + 1) & (slots_.size() - 1);
  return slot;
}

uint32_t Bpe::rank_of(int left, int right) const { return slots_[slot_of(pair_of(left, right))].rank; }

void Bpe::add_merge(int left, int right, int merged) {
  CACHALOT_CHECK(2 * merges_.size() < slots_.size());
  const uint64_t pair = pair_of(left, right);
  slots_[slot_of(pair)] = {pair, static_cast<uint32_t>(merges_.size())};
  merges_.push_back({left, right, merged});
}

void Bpe::set_bytes(const Vocabulary& vocabulary, int unknown) {
  // Some tokenizers hold the bytes that UTF-8 never uses as added tokens rather than in the BPE vocabulary.
  const auto id_of = [&vocabulary](char byte) {
    if (const auto id = vocabulary.find_bytes({&byte, 1})) return *id;
    const auto added = vocabulary.find_text(unicode::bytes_to_alphabet({&byte, 1}));
    return added ? *added : -1;
  };
  for (size_t byte = 0; byte < 256; ++byte) byte_ids_[byte] = id_of(static_cast<char>(byte));
  replacement_.clear();
  if (unknown >= 0) {
    replacement_.push_back(unknown);
    return;
  }
  for (const char byte : unicode::kReplacement) {
    if (const int id = byte_ids_[static_cast<uint8_t>(byte)]; id >= 0) replacement_.push_back(id);
  }
  if (replacement_.size() != unicode::kReplacement.size()) replacement_.clear();
}

void Bpe::encode(std::string_view piece, std::vector<int>& out) const {
  const size_t from = out.size();
  for (const char byte : piece) {
    if (const int id = byte_ids_[static_cast<uint8_t>(byte)]; id >= 0) {
      out.push_back(id);
    } else {
      out.insert(out.end(), replacement_.begin(), replacement_.end());
    }
  }
  if (out.size() - from < 2) return;
  if (out.size() - from <= kShort) {
    merge_short(out, from);
  } else {
    merge_long(out, from);
  }
}

void Bpe::merge_short(std::vector<int>& ids, size_t from) const {
  std::array<uint32_t, kShort> ranks;  // ranks[i]: of the pair (i, i + 1)
  size_t n = ids.size() - from;
  int* const id = ids.data() + from;
  for (size_t i = 0; i + 1 < n; ++i) ranks[i] = rank_of(id[i], id[i + 1]);
  while (n > 1) {
    const size_t at = static_cast<size_t>(std::min_element(ranks.begin(), ranks.begin() + static_cast<ptrdiff_t>(n - 1)) - ranks.begin());
    if (ranks[at] == kNoRank) break;
    id[at] = merges_[ranks[at]].merged;
    std::copy(id + at + 2, id + n, id + at + 1);
    if (at + 2 < n)
      std::copy(ranks.begin() + static_cast<ptrdiff_t>(at + 1), ranks.begin() + static_cast<ptrdiff_t>(n - 1),
                ranks.begin() + static_cast<ptrdiff_t>(at));
    --n;
    if (at + 1 < n) ranks[at] = rank_of(id[at], id[at + 1]);
    if (at > 0) ranks[at - 1] = rank_of(id[at - 1], id[at]);
  }
  ids.resize(from + n);
}

void Bpe::merge_long(std::vector<int>& ids, size_t from) const {
  // A queue entry is rank << 32 | position of the left symbol. It is stale unless ranks[position] still says so: each rank belongs
  // to one pair, so no other check is needed.
  const size_t n = ids.size() - from;
  CACHALOT_CHECK(n < kNoRank);
  int* const id = ids.data() + from;
  std::vector<uint32_t> ranks(n, kNoRank), next(n), previous(n);
  std::vector<uint64_t> entries;
  entries.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    next[i] = static_cast<uint32_t>(i + 1);
    previous[i] = static_cast<uint32_t>(i - 1);  // of the first: kNoRank, never used
    if (i + 1 == n) break;
    ranks[i] = rank_of(id[i], id[i + 1]);
    if (ranks[i] != kNoRank) entries.push_back(static_cast<uint64_t>(ranks[i]) << 32 | i);
  }
  std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<>> queue(std::greater<>(), std::move(entries));
  const auto renew = [&](size_t at) {
    ranks[at] = next[at] < n ? rank_of(id[at], id[next[at]]) : kNoRank;
    if (ranks[at] != kNoRank) queue.push(static_cast<uint64_t>(ranks[at]) << 32 | at);
  };
  constexpr int kGone = -1;
  while (!queue.empty()) {
    const auto rank = static_cast<uint32_t>(queue.top() >> 32);
    const auto at = static_cast<size_t>(queue.top() & 0xFFFFFFFF);
    queue.pop();
    if (ranks[at] != rank) continue;
    const size_t right = next[at];
    id[at] = merges_[rank].merged;
    id[right] = kGone;
    ranks[right] = kNoRank;
    next[at] = next[right];
    if (next[at] < n) previous[next[at]] = static_cast<uint32_t>(at);
    renew(at);
    if (at > 0) renew(previous[at]);
  }
  ids.erase(std::remove(ids.begin() + static_cast<ptrdiff_t>(from), ids.end(), kGone), ids.end());
}

}  // namespace cachalot
