// EventHub.
#include "server/event_hub.h"

#include <iterator>
#include <utility>

namespace cachalot::server {

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
  lane->post([lane] { deliver(*lane); });
}

void EventHub::deliver(Lane& lane) {
  std::vector<Item> items;
  {
    const std::lock_guard lock(lane.mutex);
    items.swap(lane.ready);
    lane.posted = false;
  }
  for (const Item& item : items) item.sink->on_event(item.choice, item.event);
  lane.after_batch();
}

}  // namespace cachalot::server
