// Reads /sys/devices/system, and deals workers out.
#include "base/cpu_topology.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <map>
#include <set>

namespace cachalot {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Cores before their further hyper-threads; with `alternate`, nodes in turn.
std::vector<Cpu> in_order(std::vector<Cpu> cpus, bool alternate) {
  std::stable_sort(cpus.begin(), cpus.end(), [](const Cpu& a, const Cpu& b) { return (a.id != a.core) < (b.id != b.core); });
  if (!alternate) return cpus;
  std::map<int, int> seen;  // CPUs of a node so far
  std::vector<std::pair<int, Cpu>> turns;
  turns.reserve(cpus.size());
  for (const Cpu& cpu : cpus) turns.emplace_back(seen[cpu.node]++, cpu);
  std::stable_sort(turns.begin(), turns.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  for (size_t i = 0; i < cpus.size(); ++i) cpus[i] = turns[i].second;
  return cpus;
}

}  // namespace

std::vector<int> parse_cpu_list(std::string_view text) {
  constexpr int kMostCpus = 1 << 16;
  std::vector<int> out;
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.remove_suffix(1);
  const char *at = text.data(), *const end = at + text.size();
  const auto number = [&](int& value) {
    const auto [next, problem] = std::from_chars(at, end, value);
    at = next;
    return problem == std::errc() && value >= 0 && value < kMostCpus;
  };
  while (at != end) {
    int first = 0;
    if (!number(first)) return {};
    int last = first;
    if (at != end && *at == '-') {
      ++at;
      if (!number(last) || last < first) return {};
    }
    for (int cpu = first; cpu <= last; ++cpu) out.push_back(cpu);
    if (at == end) break;
    if (*at++ != ',' || at == end) return {};
  }
  return out;
}

std::vector<Cpu> cpu_topology(std::span<const int> cpus, const std::string& sys) {
  std::map<int, int> node_of;
  for (const int node : parse_cpu_list(first_line(sys + "/devices/system/node/online")))
    for (const int cpu : parse_cpu_list(first_line(sys + "/devices/system/node/node" + std::to_string(node) + "/cpulist")))
      node_of[cpu] = node;
  std::vector<Cpu> out;
  for (const int cpu : cpus) {
    const auto siblings =
        parse_cpu_list(first_line(sys + "/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list"));
    const auto node = node_of.find(cpu);
    out.push_back({.id = cpu,
                   .node = node != node_of.end() ? node->second : 0,
                   .core = siblings.empty() ? cpu : *std::min_element(siblings.begin(), siblings.end())});
  }
  return out;
}

std::vector<std::vector<int>> place_workers(std::span<const Cpu> cpus, int n_workers, bool pin, Numa numa, int home) {
  std::vector<std::vector<int>> out(static_cast<size_t>(std::max(n_workers, 0)));
  std::vector<Cpu> usable(cpus.begin(), cpus.end());
  std::set<int> nodes;
  for (const Cpu& cpu : usable) nodes.insert(cpu.node);
  const bool several = nodes.size() > 1;
  if (several && numa == Numa::isolate && nodes.contains(home)) std::erase_if(usable, [home](const Cpu& cpu) { return cpu.node != home; });
  if (usable.empty() || (!pin && (!several || numa == Numa::none))) return out;
  const std::vector<Cpu> order = in_order(usable, several && numa == Numa::distribute);
  for (size_t i = 0; i < out.size(); ++i) {
    const Cpu& own = order[i % order.size()];
    if (pin) {
      out[i] = {own.id};
      continue;
    }
    for (const Cpu& cpu : usable)
      if (cpu.node == own.node) out[i].push_back(cpu.id);
  }
  return out;
}

}  // namespace cachalot
