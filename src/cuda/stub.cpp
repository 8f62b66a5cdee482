// The CUDA backend of a build without CUDA: there, but saying so.
#include "base/error.h"
#include "cuda/cuda_ops.h"

namespace cachalot {
namespace {
[[noreturn]] void no_cuda() { fail("CUDA: found a program built without CUDA, expected one configured with CACHALOT_CUDA=ON"); }
}  // namespace

bool cuda_available() { return false; }
std::unique_ptr<Ops> make_cuda_ops(const CudaOptions&) { no_cuda(); }
void cuda_synchronize(Ops&) { no_cuda(); }
double cuda_seconds(Ops&, const std::function<void()>&) { no_cuda(); }

}  // namespace cachalot
