// The way of tokens from the engine's thread to the I/O threads: collected while a step's events come in, handed over once per step and
// I/O thread. What piles up while an I/O thread is busy reaches it as one batch, so that it writes less often under load, never more.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "cachalot/engine.h"

namespace cachalot::server {

// Takes the events of one request's choices, on its I/O thread.
class EventSink {
 public:
  virtual ~EventSink() = default;
  virtual void on_event(int choice, const TokenEvent& event) = 0;
};

class EventHub {
 public:
  using Post = std::function<void(std::function<void()>)>;  // runs a function on one I/O thread

  // Takes over the engine's after_step hook: make it before the first submit(). `posts`: one per I/O thread. `after_batch` is called on an
  // I/O thread when a batch was delivered.
  EventHub(Engine& engine, std::vector<Post> posts, std::function<void(int io_thread)> after_batch);
  ~EventHub();  // from now on events go nowhere; the engine may live on
  EventHub(const EventHub&) = delete;
  EventHub& operator=(const EventHub&) = delete;

  // Throws Refused. The sink lives until its last event was delivered.
  RequestId submit(Request request, int io_thread, std::shared_ptr<EventSink> sink, int choice);

 private:
  struct Item {
    std::shared_ptr<EventSink> sink;
    int choice;
    TokenEvent event;
  };
  // Shared with closures that the engine may hold longer than this object lives.
  struct Lane {
    std::vector<Item> collected;  // of the running step; the engine's thread only
    std::mutex mutex;
    std::vector<Item> ready;
    bool posted = false;
    // Being delivered; the I/O thread's only. In slices, so that under load new connections and requests still come to their turn.
    std::vector<Item> batch;
    size_t done = 0;  // of the batch
    Post post;        // under the mutex; empty once the hub is gone
    std::function<void()> after_batch;
  };
  static void hand_over(const std::shared_ptr<Lane>& lane);
  static void deliver(const std::shared_ptr<Lane>& lane);

  Engine& engine_;
  std::vector<std::shared_ptr<Lane>> lanes_;
};

}  // namespace cachalot::server
