// EventHub.
#include "server/event_hub.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

namespace cachalot::server {
namespace {

constexpr size_t kSlice = 1024;  // events: some milliseconds

}  // namespace

EventHub::EventHub(Engine& engine, std::vector<Post> posts, std::function<void(int)> after_batch) : engine_(engine) {
  for (size_t i = 0; i < posts.size(); ++i) {
    auto lane = std::make_shared<Lane>();
    lane->post = std::move(posts[i]);
    lane->after_batch = [after_batch, i] { after_batch(static_cast<int>(i)); };
    lanes_.push_back(std::move(lane));
  }
  engine.after_step([lanes = lanes_] {
    for (const auto& lane : lanes) hand_over(lane);
  });
}

EventHub::~EventHub() {
  for (const auto& lane : lanes_) {
    const std::lock_guard lock(lane->mutex);
    lane->post = nullptr;
  }
}

RequestId EventHub::submit(Request request, int io_thread, std::shared_ptr<EventSink> sink, int choice) {
  return engine_.submit(std::move(request),
                        [lane = lanes_[static_cast<size_t>(io_thread)], sink = std::move(sink), choice](const TokenEvent& event) {
                          lane->collected.push_back({sink, choice, event});
                        });
}

void EventHub::hand_over(const std::shared_ptr<Lane>& lane) {
  if (lane->collected.empty()) return;
  const std::lock_guard lock(lane->mutex);
  if (!lane->post) {
    lane->collected.clear();
    return;
  }
  if (lane->ready.empty())
    lane->ready.swap(lane->collected);
  else
    std::move(lane->collected.begin(), lane->collected.end(), std::back_inserter(lane->ready));
  lane->collected.clear();
  if (std::exchange(lane->posted, true)) return;
  lane->post([lane] { deliver(lane); });
}

void EventHub::deliver(const std::shared_ptr<Lane>& shared) {
  Lane& lane = *shared;
  if (lane.done == lane.batch.size()) {
    lane.batch.clear();
    lane.done = 0;
    {
      const std::lock_guard lock(lane.mutex);
      lane.batch.swap(lane.ready);
    }
    // A request's events stand together, so that no slice ends within them and each is written to once.
    if (lane.batch.size() > kSlice)
      std::stable_sort(lane.batch.begin(), lane.batch.end(),
                       [](const Item& a, const Item& b) { return std::less<>()(a.sink.get(), b.sink.get()); });
  }
  const EventSink* last = nullptr;
  for (size_t n = 0; lane.done < lane.batch.size() && (n < kSlice || lane.batch[lane.done].sink.get() == last); ++n) {
    const Item item = std::move(lane.batch[lane.done++]);
    last = item.sink.get();
    item.sink->on_event(item.choice, item.event);
  }
  const bool more = lane.done < lane.batch.size();
  if (!more) {
    lane.batch.clear();
    lane.done = 0;
  }
  lane.after_batch();
  const std::lock_guard lock(lane.mutex);
  if (more || !lane.ready.empty()) {
    if (lane.post) lane.post([shared] { deliver(shared); });
  } else {
    lane.posted = false;
  }
}

}  // namespace cachalot::server
