// Chooses the backend.
#include "cli/backend.h"

#include <charconv>

#include "base/error.h"
#include "cpu/cpu_ops.h"
#include "cuda/cuda_ops.h"

namespace cachalot {
namespace {

// "cuda" is 0, "cuda:3" is 3; -1 for another text.
int cuda_index(std::string_view device) {
  if (device == "cuda") return 0;
  if (!device.starts_with("cuda:")) return -1;
  const std::string_view number = device.substr(5);
  int index = -1;
  const auto [end, problem] = std::from_chars(number.data(), number.data() + number.size(), index);
  return problem == std::errc() && end == number.data() + number.size() ? index : -1;
}

}  // namespace

std::unique_ptr<Ops> make_ops(std::string_view device, const BackendOptions& options) {
  if (device == "ref") return make_ref_ops();
  if (device == "cpu")
    return make_cpu_ops({.n_threads = options.n_threads,
                         .pin = options.pin,
                         .numa = options.numa,
                         .bf16_prompts = !options.batch_invariant && !options.f32});
  const int index = cuda_index(device);
  if (index >= 0 && options.batch_invariant) fail("{}: batch-invariant results are only to be had on the CPU", printable(device));
  if (index >= 0) return make_cuda_ops({.device = index, .activation = options.f32 ? DType::f32 : DType::bf16});
  fail("--device: found \"{}\", expected cpu, cuda, cuda:N or ref", printable(device));
}

std::unique_ptr<HybridOps> make_gpu_and_cpu(std::string_view device, const BackendOptions& options) {
  if (cuda_index(device) < 0) fail("--cpu-experts: found --device {}, expected a GPU (cuda or cuda:N)", printable(device));
  return make_hybrid_ops(make_ops(device, options), make_ops("cpu", options));
}

std::string backends_built() { return std::string("ref cpu") + (CACHALOT_BUILT_WITH_CUDA ? " cuda" : ""); }

}  // namespace cachalot
