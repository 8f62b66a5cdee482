// CudaOps::sample and draw: one kernel, which reads the rows' settings from the host's memory and writes its results there, so that nothing
// is copied in between; lists, if any, are uploaded. Rows that the kernel does not take (lists that name a token twice, more than kMostTop
// log probabilities) go the host's way.
#include "cuda/sample.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "cuda/cuda_ops_impl.h"

namespace cachalot::cuda {
namespace {

size_t aligned(size_t bytes) { return (bytes + 255) & ~size_t{255}; }

bool penalises(const SampleParams& p) { return p.repetition != 1.0f || p.presence != 0.0f || p.frequency != 0.0f; }

}  // namespace

// What one call uploads. Tokens outside the vocabulary are left out.
struct SampleLists {
  std::vector<SampleRow> rows;
  std::vector<int> at;  // of each row: which row of the call it is
  std::vector<SeenToken> seen;
  std::vector<BiasedToken> bias;
  std::vector<uint32_t> allowed;
  std::vector<uint32_t> marks;  // [vocab] the last list that named a token
  uint32_t list = 0;
  int n_top = 0;

  void clear(int vocab) {
    rows.clear(), at.clear(), seen.clear(), bias.clear(), allowed.clear();
    n_top = 0;
    if (marks.size() != static_cast<size_t>(vocab) || list > 0xf0000000u) marks.assign(static_cast<size_t>(vocab), 0), list = 0;
  }
  // False, and nothing added, when the kernel does not take such a row.
  bool add(const SampleParams& p, int row) {
    const auto vocab = static_cast<int>(marks.size());
    const size_t n_seen = seen.size(), n_bias = bias.size();
    const auto twice = [&](int token) { return std::exchange(marks[static_cast<size_t>(token)], list) == list; };
    bool good = p.n_logprobs <= kMostTop;
    ++list;
    if (penalises(p)) {
      for (const TokenCount& t : p.history) {
        if (t.token < 0 || t.token >= vocab) continue;
        good = good && !twice(t.token) && t.in_prompt >= 0 && t.in_output >= 0;
        if (t.in_prompt + t.in_output > 0) seen.push_back({t.token, t.in_output});
      }
    }
    ++list;
    for (const TokenBias& b : p.bias) {
      if (b.token < 0 || b.token >= vocab) continue;
      good = good && !twice(b.token);
      bias.push_back({b.token, b.bias});
    }
    if (!good) {
      seen.resize(n_seen);
      bias.resize(n_bias);
      return false;
    }
    SampleRow r;
    r.temperature = p.temperature > 0.0f ? static_cast<double>(p.temperature) : 0.0;
    r.top_p = static_cast<double>(p.top_p);
    r.log_min_p = p.min_p > 0.0f ? std::log(std::min(1.0, static_cast<double>(p.min_p))) : -INFINITY;
    r.seed = p.seed;
    r.step = p.step;
    r.top_k = p.top_k;
    r.repetition = p.repetition;
    r.presence = p.presence;
    r.frequency = p.frequency;
    r.seen_begin = static_cast<int>(n_seen);
    r.n_seen = static_cast<int>(seen.size() - n_seen);
    r.bias_begin = static_cast<int>(n_bias);
    r.n_bias = static_cast<int>(bias.size() - n_bias);
    if (!p.allowed.empty()) {
      const size_t words = std::min(p.allowed.size(), static_cast<size_t>((vocab + 31) / 32));
      r.allowed_begin = static_cast<int>(allowed.size());
      r.n_allowed = static_cast<int>(words);
      allowed.insert(allowed.end(), p.allowed.begin(), p.allowed.begin() + static_cast<ptrdiff_t>(words));
    }
    r.n_logprobs = p.n_logprobs;
    r.top_begin = n_top;
    n_top += std::max(0, p.n_logprobs);
    rows.push_back(r);
    at.push_back(row);
    return true;
  }
};

// One launch: its rows, and where their settings, lists and results are.
struct SampleSlot {
  ~SampleSlot() {
    if (done != nullptr) cudaEventDestroy(done);
  }
  void grow(size_t up, size_t down) {
    if (done == nullptr) CACHALOT_CUDA_CHECK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
    if (up > up_bytes) {
      up_bytes = std::max(2 * up_bytes, up);
      up_host = pinned_memory(up_bytes);
      up_device = device_memory(up_bytes);
    }
    if (down > down_bytes) {
      down_bytes = std::max(2 * down_bytes, down);
      results = pinned_memory(down_bytes);
    }
  }
  // Waits for the launch. out: of its rows.
  void take(std::span<Sampled> out) {
    busy = false;
    CACHALOT_CUDA_CHECK(cudaEventSynchronize(done));
    const auto* found = static_cast<const SampleResult*>(results.get());
    const auto* tops = reinterpret_cast<const TopToken*>(static_cast<const std::byte*>(results.get()) + top_at);
    for (size_t i = 0; i < rows.size(); ++i) {
      const SampleResult& r = found[i];
      Sampled& s = out[i];
      s = {.token = r.token, .finite = r.token >= 0};
      if (!s.finite || rows[i].n_logprobs < 0) continue;
      s.logprob = logprob_of(r.logit, r.highest, r.sum);
      for (const TopToken& t : std::span(tops + rows[i].top_begin, static_cast<size_t>(r.n_top)))
        s.top.push_back({t.token, logprob_of(t.logit, r.highest, r.sum)});
    }
  }

  std::vector<SampleRow> rows;
  Buffer up_host, up_device, results;  // pinned, on the device, pinned
  size_t up_bytes = 0, down_bytes = 0, top_at = 0;
  cudaEvent_t done = nullptr;
  bool busy = false;
};

Sampler::Sampler() : lists_(std::make_unique<SampleLists>()) {}
Sampler::~Sampler() = default;

SampleSlot& Sampler::free_slot() {
  for (const auto& slot : slots_)
    if (!slot->busy) return *slot;
  return *slots_.emplace_back(std::make_unique<SampleSlot>());
}

void CudaOps::sample(View logits, std::span<const SampleParams> params, std::span<Sampled> out) {
  const int n = logits.n_rows();
  CACHALOT_CHECK(logits.dtype == DType::f32 && params.size() == static_cast<size_t>(n) && out.size() == params.size());
  if (n == 0) return;
  not_in_forward("sampling");
  SampleLists& lists = sampler_.lists();
  lists.clear(logits.n_cols());
  for (int i = 0; i < n; ++i) {
    const auto at = static_cast<size_t>(i);
    if (!lists.add(params[at], i)) Ops::sample(logits.rows(i, 1), params.subspan(at, 1), out.subspan(at, 1));
  }
  // Consecutive rows go together: in nearly every step these are all.
  for (size_t begin = 0; begin < lists.rows.size();) {
    size_t end = begin + 1;
    while (end < lists.rows.size() && lists.at[end] == lists.at[end - 1] + 1) ++end;
    const auto first = static_cast<size_t>(lists.at[begin]);
    enqueue_sample(logits.rows(lists.at[begin], static_cast<int>(end - begin)), begin, nullptr).take(out.subspan(first, end - begin));
    begin = end;
  }
}

std::unique_ptr<Draw> CudaOps::draw(View logits, std::span<const SampleParams> params, View tokens) {
  class OnItsWay final : public Draw {
   public:
    explicit OnItsWay(SampleSlot& slot) : slot_(slot) {}
    ~OnItsWay() override { slot_.busy = false; }
    void wait(std::span<Sampled> out) override { slot_.take(out); }

   private:
    SampleSlot& slot_;
  };
  const int n = logits.n_rows();
  CACHALOT_CHECK(logits.dtype == DType::f32 && params.size() == static_cast<size_t>(n) && n > 0);
  CACHALOT_CHECK(tokens.dtype == DType::i32 && tokens.n_cols() == n);
  not_in_forward("sampling");
  SampleLists& lists = sampler_.lists();
  lists.clear(logits.n_cols());
  for (int i = 0; i < n; ++i)
    if (!lists.add(params[static_cast<size_t>(i)], i)) return Ops::draw(logits, params, tokens);
  SampleSlot& slot = enqueue_sample(logits, 0, static_cast<int*>(tokens.data));
  slot.busy = true;
  return std::make_unique<OnItsWay>(slot);
}

SampleSlot& CudaOps::enqueue_sample(View logits, size_t begin, int* tokens) {
  const SampleLists& lists = sampler_.lists();
  const auto n = static_cast<size_t>(logits.n_rows());
  const size_t rows = aligned(n * sizeof(SampleRow)), seen = aligned(lists.seen.size() * sizeof(SeenToken)),
               bias = aligned(lists.bias.size() * sizeof(BiasedToken)), allowed = aligned(lists.allowed.size() * sizeof(uint32_t));
  const size_t filled = rows + seen + bias + allowed, kept = aligned((lists.seen.size() + lists.bias.size()) * sizeof(float));
  SampleSlot& slot = sampler_.free_slot();
  slot.top_at = aligned(n * sizeof(SampleResult));
  slot.grow(filled + kept, slot.top_at + static_cast<size_t>(lists.n_top) * sizeof(TopToken));
  slot.rows.assign(lists.rows.begin() + static_cast<ptrdiff_t>(begin), lists.rows.begin() + static_cast<ptrdiff_t>(begin + n));

  auto* const host = static_cast<std::byte*>(slot.up_host.get());
  std::byte* to = host;
  const auto put = [&to](const auto& list, size_t bytes) {
    if (!list.empty()) std::memcpy(to, list.data(), list.size() * sizeof(list[0]));
    to += bytes;
  };
  put(slot.rows, rows);
  put(lists.seen, seen);
  put(lists.bias, bias);
  put(lists.allowed, allowed);
  auto* const device = static_cast<std::byte*>(slot.up_device.get());
  if (filled > rows) CACHALOT_CUDA_CHECK(cudaMemcpyAsync(device + rows, host + rows, filled - rows, cudaMemcpyHostToDevice, stream_));
  SampleArgs a;
  a.logits = static_cast<float*>(logits.data);
  a.stride = logits.stride[0];
  a.n_rows = static_cast<int>(n);
  a.vocab = logits.n_cols();
  a.rows = reinterpret_cast<const SampleRow*>(host);
  a.seen = reinterpret_cast<const SeenToken*>(device + rows);
  a.bias = reinterpret_cast<const BiasedToken*>(device + rows + seen);
  a.allowed = reinterpret_cast<const uint32_t*>(device + rows + seen + bias);
  a.seen_kept = reinterpret_cast<float*>(device + filled);
  a.bias_kept = a.seen_kept + lists.seen.size();
  a.results = static_cast<SampleResult*>(slot.results.get());
  a.top = reinterpret_cast<TopToken*>(static_cast<std::byte*>(slot.results.get()) + slot.top_at);
  a.tokens = tokens;
  done(launch_sample(a, hopper_, stream_), "sample");
  CACHALOT_CUDA_CHECK(cudaEventRecord(slot.done, stream_));
  return slot;
}

}  // namespace cachalot::cuda
