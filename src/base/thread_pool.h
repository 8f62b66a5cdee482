// ThreadPool: the one source of parallelism on the CPU. A pool of n workers counts the calling thread as worker 0.
#pragma once

#include <functional>
#include <memory>

#include "base/cpu_topology.h"

namespace cachalot {

struct ThreadPoolOptions {
  int n_threads = 0;  // <= 0: one per physical core that this process may run on, with Numa::isolate of its node
  bool pin = false;   // ties each worker, not the caller, to a CPU of its own
  // On a machine of several nodes also sets where the memory of the constructing thread and of the workers comes from; with isolate that
  // thread stays on its node.
  Numa numa = Numa::none;
};

class ThreadPool {
 public:
  explicit ThreadPool(const ThreadPoolOptions& options);
  explicit ThreadPool(int n_threads = 0) : ThreadPool(ThreadPoolOptions{.n_threads = n_threads}) {}
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] int size() const;

  // Runs task(index, worker) for each index in [0, n_tasks), each once, workers taking the next free index; returns when all are done.
  // `worker` is in [0, size()). Calls must not nest. Which worker runs which index is not fixed, so a task's result must not depend on it.
  // The first exception that a task throws is thrown again here once all have ended.
  void run(int n_tasks, const std::function<void(int index, int worker)>& task);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Physical cores available to this process: those of its affinity mask, hyper-threads of one core counted once, and no more than the CPU
// time that its control group grants.
int physical_cores();

// NUMA nodes among the CPUs that this process may run on.
int numa_nodes();

}  // namespace cachalot
