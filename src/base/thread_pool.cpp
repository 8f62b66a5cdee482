// ThreadPool: workers that spin for a short while after each run and then sleep on a futex.
//
// A run is published as one 64-bit ticket: its number in the high half, the next free index in the low half. A worker claims an index by
// compare-and-swap on the whole ticket, so one that wakes late finds another run's number and goes back to sleep; the caller therefore
// waits only for indices that were claimed, never for a worker that the system has not scheduled.
#include "base/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <fstream>
#include <mutex>
#include <set>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"

namespace cachalot {
namespace {

using Task = std::function<void(int, int)>;

// About 50 to 150 microseconds of pauses: longer than the gap between two operations of a model, shorter than anyone minds.
constexpr int kSpins = 4000;

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

std::vector<int> allowed_cpus() {
  std::vector<int> cpus;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  if (cpus.empty()) {  // more CPUs than the set holds
    const int n = std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
    for (int cpu = 0; cpu < n; ++cpu) cpus.push_back(cpu);
  }
  return cpus;
}

// CPUs' worth of time that control group v2 grants, rounded up; a large number without a limit.
int granted_cpus() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  long quota = 0, period = 0;
  if (!(file >> quota >> period) || quota <= 0 || period <= 0) return 1 << 20;
  return static_cast<int>(std::min<long>((quota + period - 1) / period, 1 << 20));
}

int count_cores(std::span<const Cpu> cpus) {
  std::set<int> cores;
  for (const Cpu& cpu : cpus) cores.insert(cpu.core);
  return std::max(1, std::min(static_cast<int>(cores.size()), granted_cpus()));
}

void bind(pthread_t thread, std::span<const int> cpus) {
  if (cpus.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus)
    if (cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  pthread_setaffinity_np(thread, sizeof set, &set);
}

// Pages that this thread, and threads that it starts from now on, touch first are taken from the nodes in turn. Without effect where the
// system does not allow it.
void interleave_memory(std::span<const Cpu> cpus) {
#if defined(SYS_set_mempolicy)
  constexpr int kInterleave = 3, kMostNodes = 1024, kWord = 64;
  uint64_t mask[kMostNodes / kWord] = {};
  for (const Cpu& cpu : cpus)
    if (cpu.node < kMostNodes) mask[cpu.node / kWord] |= uint64_t{1} << (cpu.node % kWord);
  syscall(SYS_set_mempolicy, kInterleave, mask, kMostNodes);
#else
  static_cast<void>(cpus);
#endif
}

int node_of_this_thread(std::span<const Cpu> cpus) {
  const int here = sched_getcpu();
  for (const Cpu& cpu : cpus)
    if (cpu.id == here) return cpu.node;
  return cpus.empty() ? 0 : cpus.front().node;
}

int count_nodes(std::span<const Cpu> cpus) {
  std::set<int> nodes;
  for (const Cpu& cpu : cpus) nodes.insert(cpu.node);
  return static_cast<int>(nodes.size());
}

}  // namespace

int physical_cores() { return count_cores(cpu_topology(allowed_cpus())); }
int numa_nodes() { return count_nodes(cpu_topology(allowed_cpus())); }

struct ThreadPool::State {
  alignas(64) std::atomic<uint64_t> ticket{0};     // run number << 32 | next free index
  alignas(64) std::atomic<int> finished{0};        // indices done of the current run
  alignas(64) std::atomic<uint32_t> published{0};  // run number, the word that workers sleep on
  std::atomic<const Task*> task{nullptr};
  std::atomic<int> n_tasks{0};
  std::atomic<bool> stop{false}, running{false};
  int spins = kSpins;
  std::mutex error_lock;
  std::exception_ptr error;
  std::vector<std::thread> threads;

  // Claims and runs indices of run `number` until none is free.
  void work(uint32_t number, int worker) {
    uint64_t seen = ticket.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(seen >> 32) == number) {
      // Both belong to run `number` if the exchange succeeds: they change only after all of its indices were claimed.
      const Task* run_task = task.load(std::memory_order_acquire);
      const int n = n_tasks.load(std::memory_order_acquire);
      const auto index = static_cast<uint32_t>(seen);
      if (index >= static_cast<uint32_t>(n)) return;
      if (!ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      try {
        (*run_task)(static_cast<int>(index), worker);
      } catch (...) {
        const std::lock_guard<std::mutex> hold(error_lock);
        if (!error) error = std::current_exception();
      }
      finished.fetch_add(1, std::memory_order_acq_rel);
      seen = ticket.load(std::memory_order_acquire);
    }
  }

  void loop(int worker) {
    uint32_t last = 0;
    while (true) {
      uint32_t now = published.load(std::memory_order_acquire);
      for (int i = 0; i < spins && now == last; ++i) {
        pause_cpu();
        now = published.load(std::memory_order_acquire);
      }
      if (now == last) {
        published.wait(last, std::memory_order_acquire);
        continue;
      }
      if (stop.load(std::memory_order_acquire)) return;
      last = now;
      work(now, worker);
    }
  }
};

ThreadPool::ThreadPool(const ThreadPoolOptions& options) : state_(std::make_unique<State>()) {
  std::vector<Cpu> cpus = cpu_topology(allowed_cpus());
  const int home = node_of_this_thread(cpus);
  if (count_nodes(cpus) > 1) {
    if (options.numa == Numa::distribute) interleave_memory(cpus);
    if (options.numa == Numa::isolate) {
      std::erase_if(cpus, [home](const Cpu& cpu) { return cpu.node != home; });
      std::vector<int> near;
      for (const Cpu& cpu : cpus) near.push_back(cpu.id);
      bind(pthread_self(), near);
    }
  }
  const int n_threads = options.n_threads > 0 ? options.n_threads : count_cores(cpus);
  // With more workers than CPUs a spinning one would keep a working one from running.
  if (n_threads > static_cast<int>(cpus.size())) state_->spins = 0;
  const auto places = place_workers(cpus, n_threads, options.pin, options.numa, home);
  for (int worker = 1; worker < n_threads; ++worker) {
    state_->threads.emplace_back([state = state_.get(), worker] { state->loop(worker); });
    bind(state_->threads.back().native_handle(), places[static_cast<size_t>(worker)]);
  }
}

ThreadPool::~ThreadPool() {
  state_->stop.store(true, std::memory_order_release);
  state_->published.fetch_add(1, std::memory_order_acq_rel);
  state_->published.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
}

int ThreadPool::size() const { return static_cast<int>(state_->threads.size()) + 1; }

void ThreadPool::run(int n_tasks, const Task& task) {
  if (n_tasks <= 0) return;
  State& s = *state_;
  CACHALOT_CHECK(!s.running.exchange(true), "runs of one pool must not nest or overlap");
  if (s.threads.empty() || n_tasks == 1) {
    struct Reset {
      std::atomic<bool>& flag;
      ~Reset() { flag.store(false); }
    } reset{s.running};
    for (int i = 0; i < n_tasks; ++i) task(i, 0);
    return;
  }
  const uint32_t number = s.published.load(std::memory_order_relaxed) + 1;
  const uint64_t ticket = static_cast<uint64_t>(number) << 32;
  // First a ticket without a free index: a late worker that already reads the new task and count cannot claim with the old ticket.
  s.ticket.store(ticket | 0xffffffffu, std::memory_order_relaxed);
  s.task.store(&task, std::memory_order_release);
  s.n_tasks.store(n_tasks, std::memory_order_release);
  s.finished.store(0, std::memory_order_relaxed);
  s.ticket.store(ticket, std::memory_order_release);
  s.published.store(number, std::memory_order_release);
  s.published.notify_all();
  s.work(number, 0);
  for (int i = 0; s.finished.load(std::memory_order_acquire) != n_tasks; ++i) {
    if (i < kSpins) {
      pause_cpu();
    } else {
      sched_yield();
    }
  }
  const std::exception_ptr error = std::exchange(s.error, nullptr);
  s.running.store(false);
  if (error) std::rethrow_exception(error);
}

}  // namespace cachalot
