// Generator: admission, one step, sampling, endings.
#include "runtime/generator.h"

#include <algorithm>
#include <unordered_map>

#include "base/error.h"

namespace cachalot {

struct Generator::Running {
  int id = 0;
  GenerationRequest request;
  Sequence sequence;
  int n_prompt = 0, n_reused = 0, max_tokens = 0;
  bool cancelled = false, ended = false;
  std::vector<TokenCount> history;
  std::unordered_map<int, size_t> history_index;

  void count(int token, bool in_prompt) {
    const auto [entry, added] = history_index.try_emplace(token, history.size());
    if (added) history.push_back({token, 0, 0});
    (in_prompt ? history[entry->second].in_prompt : history[entry->second].in_output) += 1;
  }
  [[nodiscard]] int n_generated() const { return sequence.n_tokens() - n_prompt; }
  [[nodiscard]] SampleParams params() const {
    const SamplingOptions& s = request.sampling;
    return {.temperature = s.temperature,
            .top_k = s.top_k,
            .top_p = s.top_p,
            .min_p = s.min_p,
            .repetition = s.repetition,
            .presence = s.presence,
            .frequency = s.frequency,
            .seed = s.seed,
            .step = static_cast<uint64_t>(n_generated()),
            .history = history,
            .bias = s.bias,
            .n_logprobs = s.n_logprobs};
  }
};

Generator::Generator(Ops& ops, const Decoder& decoder, const GeneratorOptions& options)
    : ops_(ops),
      decoder_(decoder),
      options_(options),
      cache_(ops, decoder.config(), options.kv_format, options.block_tokens,
             options.max_requests * blocks_for(options.max_context, options.block_tokens)),
      runner_(ops, decoder, cache_,
              {.max_tokens = std::max(options.chunk, options.max_requests),
               .max_seqs = options.max_requests,
               .max_logits = options.max_requests,
               .max_sequence = options.max_context},
              options.form) {}

Generator::~Generator() = default;

Generator::Running* Generator::find(int request) {
  for (auto& r : requests_)
    if (r->id == request) return r.get();
  return nullptr;
}
const Generator::Running* Generator::find(int request) const { return const_cast<Generator*>(this)->find(request); }

int Generator::add(GenerationRequest request) {
  if (request.prompt.empty()) fail("the prompt holds no tokens");
  const int n_prompt = static_cast<int>(request.prompt.size());
  if (n_prompt >= options_.max_context)
    fail("the prompt has {} tokens, but the context holds {} with at least one left for the answer", n_prompt, options_.max_context);
  for (const int id : request.prompt)
    if (id < 0 || id >= decoder_.config().vocab) fail("the prompt holds token id {}, expected 0 to {}", id, decoder_.config().vocab - 1);

  auto r = std::make_unique<Running>();
  if (request.reuse) {
    if (Running* old = find(*request.reuse); old != nullptr && old->ended) {
      const auto& known = old->sequence.tokens;
      int same = 0;  // the last prompt token is always run, since its logits are wanted
      while (same < n_prompt - 1 && same < old->sequence.n_computed &&
             known[static_cast<size_t>(same)] == request.prompt[static_cast<size_t>(same)])
        ++same;
      r->sequence = std::move(old->sequence);
      cache_.truncate(r->sequence, same);
      r->n_reused = same;
      std::erase_if(requests_, [&](const auto& other) { return other.get() == old; });
    }
  }
  const auto running = std::count_if(requests_.begin(), requests_.end(), [](const auto& other) { return !other->ended; });
  if (running >= options_.max_requests) fail("{} requests are running already, which is the limit", running);
  // Rows kept for reuse give way to a new request.
  std::erase_if(requests_, [&](const auto& other) {
    if (!other->ended || static_cast<int>(requests_.size()) < options_.max_requests) return false;
    cache_.release(other->sequence);
    return true;
  });

  r->id = next_id_++;
  r->n_prompt = n_prompt;
  r->max_tokens = request.max_tokens < 0 ? options_.max_context : request.max_tokens;
  r->sequence.tokens = request.prompt;
  for (const int id : request.prompt) r->count(id, true);
  r->request = std::move(request);
  requests_.push_back(std::move(r));
  return requests_.back()->id;
}

void Generator::cancel(int request) {
  if (Running* r = find(request)) r->cancelled = true;
}

void Generator::forget(int request) {
  Running* r = find(request);
  if (r == nullptr) return;
  cache_.release(r->sequence);
  std::erase_if(requests_, [&](const auto& other) { return other.get() == r; });
}

const Sequence& Generator::sequence(int request) const {
  const Running* r = find(request);
  CACHALOT_CHECK(r != nullptr, "request {}", request);
  return r->sequence;
}

int Generator::prompt_reused(int request) const {
  const Running* r = find(request);
  return r != nullptr ? r->n_reused : 0;
}

void Generator::take_token(Running& r, Sampled sampled, const std::function<void(const GenerationEvent&)>& on_event) {
  GenerationEvent event{r.id, std::move(sampled)};
  const int token = event.sampled.token;
  if (token < 0) {
    event.finish = FinishReason::error;
  } else {
    const auto& eos = decoder_.config().eos_ids;
    const auto& own = r.request.stop_tokens;
    event.is_end_token = (!r.request.ignore_eos && std::find(eos.begin(), eos.end(), token) != eos.end()) ||
                         std::find(own.begin(), own.end(), token) != own.end();
    if (event.is_end_token) {
      event.finish = FinishReason::stop;
    } else {
      r.sequence.tokens.push_back(token);
      r.count(token, false);
      if (r.n_generated() >= r.max_tokens || r.sequence.n_tokens() >= options_.max_context) event.finish = FinishReason::length;
    }
  }
  r.ended = event.finish != FinishReason::none;
  on_event(event);
}

bool Generator::step(const std::function<void(const GenerationEvent&)>& on_event) {
  std::vector<Running*> running;
  for (const auto& r : requests_) {
    if (r->ended) continue;
    if (r->cancelled || r->max_tokens == 0) {
      r->ended = true;
      GenerationEvent event{r->id, {}};
      event.finish = r->cancelled ? FinishReason::cancelled : FinishReason::length;
      on_event(event);
      continue;
    }
    running.push_back(r.get());
  }
  if (running.empty()) return false;

  // Requests that are generating come first, so that a long prompt cannot take their rows.
  std::stable_sort(running.begin(), running.end(),
                   [](const Running* a, const Running* b) { return a->n_generated() > 0 && b->n_generated() == 0; });
  std::vector<StepItem> items;
  std::vector<Running*> in_step;
  int budget = runner_.limits().max_tokens;
  for (Running* r : running) {
    Sequence& s = r->sequence;
    const int n_new = std::min(s.n_tokens() - s.n_computed, budget);
    if (n_new <= 0) continue;
    CACHALOT_CHECK(cache_.reserve(s, s.n_computed + n_new), "the pool holds every request's whole context");
    items.push_back({&s, n_new, s.n_computed + n_new == s.n_tokens() ? WantLogits::last : WantLogits::none});
    in_step.push_back(r);
    budget -= n_new;
  }
  const StepResult result = runner_.step(items);
  for (size_t i = 0; i < items.size(); ++i) {
    if (result.first_row[i] < 0) continue;
    const SampleParams params = in_step[i]->params();
    Sampled sampled;
    ops_.sample(result.logits.rows(result.first_row[i], 1), {&params, 1}, {&sampled, 1});
    take_token(*in_step[i], std::move(sampled), on_event);
  }
  return true;
}

}  // namespace cachalot
