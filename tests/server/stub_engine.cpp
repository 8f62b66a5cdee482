// StubEngine.
#include "server/stub_engine.h"

#include <algorithm>

namespace cachalot::test {

using Steady = std::chrono::steady_clock;

StubEngine::StubEngine(StubOptions options) : options_(std::move(options)), thread_([this] { loop(); }) { stats_.blocks_total = 1000; }

StubEngine::~StubEngine() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

RequestId StubEngine::submit(Request request, OnEvent on_event) {
  const std::lock_guard lock(mutex_);
  if (closed_) throw Refused(Refused::Reason::shutting_down, "shutting down");
  const auto priority = static_cast<size_t>(request.priority);
  const int free = options_.info.max_requests - static_cast<int>(running_.size());  // taken by those who wait, in the next step
  if (static_cast<int>(waiting_[priority].size()) >= options_.max_waiting + std::max(free, 0)) {
    ++stats_.classes[priority].refused;
    throw Refused(Refused::Reason::queue_full, "the queue is full", 2.0);
  }
  if (keep_seen) seen_.push_back(request);
  auto running = std::make_shared<Running>();
  running->request = std::move(request);
  running->on_event = std::move(on_event);
  running->submitted = Steady::now();
  waiting_[priority].emplace_back(next_, std::move(running));
  wake_.notify_all();
  return next_++;
}

void StubEngine::cancel(RequestId id) {
  const std::lock_guard lock(mutex_);
  if (const auto it = running_.find(id); it != running_.end()) it->second->cancelled = true;
  for (auto& queue : waiting_)
    for (auto& [waiting, running] : queue)
      if (waiting == id) running->cancelled = true;
  wake_.notify_all();
}

void StubEngine::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
}

EngineStats StubEngine::stats() const {
  const std::lock_guard lock(mutex_);
  EngineStats out = stats_;
  bool any = !running_.empty();
  for (size_t p = 0; p < kPriorities; ++p) {
    out.classes[p].waiting = static_cast<int>(waiting_[p].size());
    any |= !waiting_[p].empty();
  }
  for (const auto& [id, running] : running_) ++out.classes[static_cast<size_t>(running->request.priority)].running;
  out.blocks_used = static_cast<int>(running_.size());
  out.last_step_age_seconds = any ? std::chrono::duration<double>(Steady::now() - last_step_).count() : 0.0;
  return out;
}

void StubEngine::hold() {
  const std::lock_guard lock(mutex_);
  options_.held = true;
}

void StubEngine::release() {
  const std::lock_guard lock(mutex_);
  options_.held = false;
  wake_.notify_all();
}

int StubEngine::open_requests() const {
  const std::lock_guard lock(mutex_);
  size_t n = running_.size();
  for (const auto& queue : waiting_) n += queue.size();
  return static_cast<int>(n);
}

std::vector<Request> StubEngine::seen() const {
  const std::lock_guard lock(mutex_);
  return seen_;
}

void StubEngine::loop() {
  auto next = Steady::now();
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] {
      if (stopping_) return true;
      bool cancelled = false, any = !running_.empty();
      for (const auto& [id, running] : running_) cancelled |= running->cancelled;
      for (const auto& queue : waiting_) {
        any |= !queue.empty();
        for (const auto& [id, running] : queue) cancelled |= running->cancelled;
      }
      return (any && !options_.held) || cancelled;
    });
    if (stopping_) return;
    if (options_.step_period.count() > 0) {
      next = std::max(next + options_.step_period, Steady::now());
      lock.unlock();
      std::this_thread::sleep_until(next);
      lock.lock();
    }
    step(lock);
  }
}

void StubEngine::step(std::unique_lock<std::mutex>& lock) {
  for (auto& queue : waiting_) {
    while (!queue.empty() && static_cast<int>(running_.size()) < options_.info.max_requests) {
      running_.insert(std::move(queue.front()));
      queue.pop_front();
    }
  }
  std::vector<std::pair<RequestId, std::shared_ptr<Running>>> now(running_.begin(), running_.end());
  for (auto& queue : waiting_) {  // cancelled before they had a place
    std::erase_if(queue, [&](auto& entry) {
      if (entry.second->cancelled) now.push_back(entry);
      return entry.second->cancelled.load();
    });
  }
  const bool held = options_.held;
  ++stats_.steps;
  lock.unlock();
  std::vector<RequestId> ended;
  for (auto& [id, r] : now) {
    if (held && !r->cancelled) continue;
    TokenEvent event{.request = id};
    const Request& request = r->request;
    if (r->cancelled) {
      event.finish = FinishReason::cancelled;
    } else {
      if (r->n_output == 0) {
        r->first = Steady::now();
        if (request.prompt_logprobs >= 0)
          for (size_t i = 1; i < request.prompt.size(); ++i)
            event.prompt_logprobs.push_back({{request.prompt[i], -1.0f}, {request.prompt[i], -1.0f}});
      }
      const int token = options_.script(request, r->n_output);
      event.token = token >= 0 ? token : (options_.info.eos_ids.empty() ? 0 : options_.info.eos_ids.front());
      event.is_end_token = token < 0;
      event.logprob = -0.5f;
      for (int i = 0; i < request.sampling.n_logprobs; ++i) event.top.push_back({event.token + i, -0.5f - static_cast<float>(i)});
      ++r->n_output;
      const int room = options_.info.max_context - static_cast<int>(request.prompt.size());
      const int most = request.max_tokens < 0 ? room : std::min(request.max_tokens, room);
      if (token == kImpossible) {
        event.token = -1;
        event.finish = FinishReason::error;
        event.error = "the request allows no token next";
        event.request_at_fault = true;
      } else if (token < 0)
        event.finish = FinishReason::stop;
      else if (r->n_output >= most)
        event.finish = FinishReason::length;
    }
    if (event.finish != FinishReason::none) {
      ended.push_back(id);
      event.usage.n_prompt = static_cast<int>(request.prompt.size());
      event.usage.n_output = r->n_output;
      event.usage.seconds = std::chrono::duration<double>(Steady::now() - r->submitted).count();
      event.usage.first_token_seconds = r->n_output > 0 ? std::chrono::duration<double>(r->first - r->submitted).count() : 0.0;
    }
    r->on_event(event);
  }
  if (hook_) hook_();
  lock.lock();
  for (const RequestId id : ended) {
    const auto it = running_.find(id);
    for (auto& [other, r] : now)
      if (other == id)
        ++(r->cancelled ? stats_.classes[static_cast<size_t>(r->request.priority)].cancelled
                        : stats_.classes[static_cast<size_t>(r->request.priority)].finished);
    if (it != running_.end()) running_.erase(it);
  }
  last_step_ = Steady::now();
}

}  // namespace cachalot::test
