// Which CPUs share a core and which share memory, and where a pool's workers go on them.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cachalot {

struct Cpu {
  int id = 0;
  int node = 0;  // of NUMA: CPUs of one node are equally near to its memory
  int core = 0;  // the lowest id among the hyper-threads of its core
  bool operator==(const Cpu&) const = default;
};

// Where threads and memory go on a machine of several NUMA nodes; the names are llama.cpp's. On one node all mean the same.
enum class Numa : unsigned char {
  none,        // as the system likes
  distribute,  // workers and new memory are spread evenly over the nodes
  isolate,     // both stay on the node that the process started on
};

// "0-3,8" is 0, 1, 2, 3, 8; empty when the text is none of these.
std::vector<int> parse_cpu_list(std::string_view text);

// Of the given CPUs, in their order. `sys` is where the system describes itself; what it does not say there is one node, and a core per
// CPU.
std::vector<Cpu> cpu_topology(std::span<const int> cpus, const std::string& sys = "/sys");

// The CPUs that each of n_workers may run on; empty: wherever the system likes. With `pin` each gets one, cores before hyper-threads.
// `home` is the node of Numa::isolate.
std::vector<std::vector<int>> place_workers(std::span<const Cpu> cpus, int n_workers, bool pin, Numa numa, int home);

}  // namespace cachalot
