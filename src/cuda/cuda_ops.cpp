// CudaOps: the device, its memory, the operations on rows; and what a runtime needs beyond Ops (graphs, timing).
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "base/check.h"
#include "cuda/cuda_ops_impl.h"
#include "cuda/moe_tokens.h"
#include "cuda/sample.h"

namespace cachalot {
namespace cuda {

Buffer device_memory(size_t bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, bytes == 0 ? 1 : bytes);
  if (error != cudaSuccess) {
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    fail("CUDA: an allocation of {} bytes failed with {} of {} bytes free: {}", bytes, free, total, cudaGetErrorString(error));
  }
  return {memory, [](void* p) { cudaFree(p); }};
}

Buffer pinned_memory(size_t bytes) {
  void* memory = nullptr;
  CACHALOT_CUDA_CHECK(cudaMallocHost(&memory, bytes));
  return {memory, [](void* p) { cudaFreeHost(p); }};
}

void UploadRing::upload(void* device, const void* host, size_t bytes, const int* drawn, cudaStream_t stream) {
  auto* const words = static_cast<int*>(ring_.take());
  std::memcpy(words, host, bytes);
  if (drawn != nullptr)
    check_cuda(launch_fetch(static_cast<int*>(device), words, static_cast<int>(bytes / sizeof(int)), drawn, stream), "upload");
  else
    CACHALOT_CUDA_CHECK(cudaMemcpyAsync(device, words, bytes, cudaMemcpyHostToDevice, stream));
  ring_.in_use_until(stream);
}

namespace {

bool is_set(const char* name) {
  const char* variable = std::getenv(name);
  return variable != nullptr && std::strcmp(variable, "1") == 0;
}

const int* ints(const View& v) {
  CACHALOT_CHECK(v.dtype == DType::i32);
  return static_cast<const int*>(v.data);
}
const float* floats(const View& v) {
  CACHALOT_CHECK(v.dtype == DType::f32);
  return static_cast<const float*>(v.data);
}

class RecordedGraph final : public Graph {
 public:
  RecordedGraph(cudaGraphExec_t exec, cudaStream_t stream, Buffer temporary)
      : exec_(exec), stream_(stream), temporary_(std::move(temporary)) {}
  ~RecordedGraph() override {
    cudaStreamSynchronize(stream_);  // it may be running still
    cudaGraphExecDestroy(exec_);
  }
  void launch() override { CACHALOT_CUDA_CHECK(cudaGraphLaunch(exec_, stream_)); }

 private:
  cudaGraphExec_t exec_;
  cudaStream_t stream_;
  Buffer temporary_;  // the arena may have given it up since
};

}  // namespace

CudaOps::CudaOps(const CudaOptions& options)
    : options_(options), arena_([this](size_t bytes) {
        if (capturing_) fail("CUDA: a recorded step needs {} more bytes of temporary memory than any step before it", bytes);
        return device_memory(bytes);
      }) {
  options_.check = options.check || is_set("CACHALOT_CUDA_CHECK");
  options_.fp8_activations = options.fp8_activations || is_set("CACHALOT_CUDA_FP8");
  CACHALOT_CHECK(options.activation == DType::bf16 || options.activation == DType::f32);
  int n_devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&n_devices);
  if (error != cudaSuccess) fail("CUDA: no device can be used: {}", cudaGetErrorString(error));
  if (options.device < 0 || options.device >= n_devices)
    fail("CUDA: found device {}, expected one of {} device(s)", options.device, n_devices);
  CACHALOT_CUDA_CHECK(cudaSetDevice(options.device));
  cudaDeviceProp properties{};
  CACHALOT_CUDA_CHECK(cudaGetDeviceProperties(&properties, options.device));
  if (properties.major < 8)
    fail("CUDA: device {} ({}) has compute capability {}.{}, expected 8.0 or higher", options.device, properties.name, properties.major,
         properties.minor);
  hopper_ = properties.major == 9;
  n_multiprocessors_ = properties.multiProcessorCount;
  most_shared_ = properties.sharedMemPerBlockOptin - 1024;  // what kernels declare statically comes on top
  CACHALOT_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  if (options.activation == DType::bf16) cublas_ = CublasLt::load();
  constexpr size_t kCounts = 2 * sizeof(unsigned long long) + kMoeTokensState * sizeof(unsigned);
  moe_barrier_ = device_memory(kCounts);
  CACHALOT_CUDA_CHECK(cudaMemset(moe_barrier_.get(), 0, kCounts));
}

CudaOps::~CudaOps() {
  cudaStreamSynchronize(stream_);
  cudaStreamDestroy(stream_);
}

void CudaOps::done(cudaError_t error, const char* op) {
  check_cuda(error, op);
  if (options_.check && !capturing_) {
    check_cuda(cudaStreamSynchronize(stream_), op);
    check_cuda(cudaGetLastError(), op);
  }
}

void CudaOps::not_in_forward(const char* what) const {
  if (capturing_ || (options_.check && arena_.mark() > 0)) fail("CUDA: {} inside a forward pass", what);
}

const CudaPacked& CudaOps::packed_of(const Linear& w) const {
  const auto* packed = dynamic_cast<const CudaPacked*>(w.packed.get());
  CACHALOT_CHECK(packed != nullptr && packed->owner == this, "a weight of another backend");
  return *packed;
}

Buffer CudaOps::alloc(size_t bytes) {
  not_in_forward("an allocation");
  Buffer buffer = device_memory(bytes);
  CACHALOT_CUDA_CHECK(cudaMemsetAsync(buffer.get(), 0, bytes, stream_));
  CACHALOT_CUDA_CHECK(cudaStreamSynchronize(stream_));
  return buffer;
}
void CudaOps::upload(void* device, const void* host, size_t bytes) {
  not_in_forward("an upload");
  if (bytes == 0) return;
  if (bytes <= UploadRing::kMostBytes) return uploads_.upload(device, host, bytes, nullptr, stream_);
  CACHALOT_CUDA_CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_));
  CACHALOT_CUDA_CHECK(cudaStreamSynchronize(stream_));
}
void CudaOps::upload_drawn(int* device, std::span<const int> words, View drawn) {
  CACHALOT_CHECK(drawn.dtype == DType::i32);
  if (words.size_bytes() > UploadRing::kMostBytes) return Ops::upload_drawn(device, words, drawn);
  not_in_forward("an upload");
  uploads_.upload(device, words.data(), words.size_bytes(), static_cast<const int*>(drawn.data), stream_);
}
void CudaOps::download(void* host, const void* device, size_t bytes) {
  not_in_forward("a download");
  if (bytes != 0) CACHALOT_CUDA_CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream_));
  CACHALOT_CUDA_CHECK(cudaStreamSynchronize(stream_));
}
void CudaOps::copy(void* to, const void* from, size_t bytes) {
  not_in_forward("a copy");
  if (bytes != 0) CACHALOT_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_));
}
View CudaOps::temp(DType dtype, int rows, int cols) {
  CACHALOT_CHECK(rows >= 0 && cols >= 0, "{} x {}", rows, cols);
  return View::matrix(arena_.take(static_cast<size_t>(rows) * static_cast<size_t>(cols) * size_of(dtype)), dtype, rows, cols);
}

MemorySize CudaOps::memory() {
  not_in_forward("a wait");
  feed_.release();  // who asks has loaded what there is to load
  MemorySize memory;
  CACHALOT_CUDA_CHECK(cudaStreamSynchronize(stream_));
  CACHALOT_CUDA_CHECK(cudaMemGetInfo(&memory.free, &memory.total));
  return memory;
}

std::unique_ptr<Graph> CudaOps::capture(const std::function<void()>& step) {
  CACHALOT_CHECK(!capturing_ && arena_.mark() == 0, "a step within a step is recorded");
  (void)arena_.take(1);  // the one chunk that the arena wants after it has grown, since a recorded step may take none
  arena_.release(0);
  CACHALOT_CUDA_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  capturing_ = true;
  cudaGraph_t graph = nullptr;
  const auto end = [&] {
    capturing_ = false;
    return cudaStreamEndCapture(stream_, &graph);
  };
  try {
    step();
  } catch (...) {
    if (end() == cudaSuccess) cudaGraphDestroy(graph);
    arena_.release(0);
    throw;
  }
  check_cuda(end(), "recording a graph");
  cudaGraphExec_t exec = nullptr;
  const cudaError_t error = cudaGraphInstantiate(&exec, graph, 0);
  cudaGraphDestroy(graph);
  check_cuda(error, "making a graph");
  auto recorded = std::make_unique<RecordedGraph>(exec, stream_, arena_.memory());
  check_cuda(cudaGraphUpload(exec, stream_), "placing a graph");  // its memory is taken now, not at the first launch
  return recorded;
}

void CudaOps::embed(const Linear& table, View ids, View x) {
  const CudaPacked& w = packed_of(table);
  CACHALOT_CHECK(w.segments.size() == 1 && table.n_matrices == 1 && x.dtype == DType::f32 && x.n_cols() == table.in);
  if (x.n_rows() == 0) return;
  Segment segment = w.segments[0];
  segment.data += table.first * segment.matrix_bytes;
  done(launch_embed(segment, ints(ids), mat_of(x), stream_), "embed");
}

void CudaOps::rmsnorm(View x, View w, float eps, View y) {
  const int n = w.n_rows() * w.n_cols(), parts = x.n_cols() / n;
  CACHALOT_CHECK(x.n_cols() == parts * n && y.n_cols() == x.n_cols() && y.n_rows() == x.n_rows(), "a norm of {} on rows of {}", n,
                 x.n_cols());
  CACHALOT_CHECK(parts == 1 || (x.n_dims == 3 && x.stride[1] == n && y.n_dims == 3 && y.stride[1] == n));
  if (x.n_rows() == 0) return;
  done(launch_rmsnorm(mat_of(x), floats(w), eps, mat_of(y), parts, n, stream_), "rmsnorm");
}

void CudaOps::add_rmsnorm(View residual, View delta, View w, float eps, View y) {
  CACHALOT_CHECK(residual.dtype == DType::f32 && delta.n_cols() == residual.n_cols() && delta.n_rows() == residual.n_rows());
  if (residual.n_rows() == 0) return;
  done(launch_add_rmsnorm(mat_of(residual), mat_of(delta), floats(w), eps, mat_of(y), stream_), "add_rmsnorm");
}

void CudaOps::rope(View qk, View pos, const Rope& rope) {
  const bool by_head = qk.n_dims == 3;
  const int heads = by_head ? qk.shape[1] : 1, head_dim = by_head ? qk.shape[2] : qk.shape[1];
  CACHALOT_CHECK(rope.dim % 2 == 0 && rope.dim <= head_dim && rope.cos_sin.n_cols() == rope.dim, "rope of {} on heads of {}", rope.dim,
                 head_dim);
  if (qk.n_rows() == 0 || rope.dim == 0) return;
  done(launch_rope(mat_of(qk), heads, head_dim, by_head ? qk.stride[1] : 0, ints(pos), floats(rope.cos_sin), rope.cos_sin.stride[0],
                   rope.dim, rope.interleaved, stream_),
       "rope");
}

void CudaOps::kv_write(const KvLayer& kv, const Batch& batch, View k, View v) {
  CACHALOT_CHECK(k.n_cols() == kv.layout.heads * kv.layout.k_dim);
  if (k.n_rows() == 0) return;
  done(launch_kv_write(kv.k, kv.layout, ints(batch.slots), mat_of(k), stream_), "kv_write");
  if (kv.layout.v_is_k_prefix) return;
  CACHALOT_CHECK(v.n_cols() == kv.layout.heads * kv.layout.v_dim);
  done(launch_kv_write(kv.v, kv.layout, ints(batch.slots), mat_of(v), stream_), "kv_write");
}

void CudaOps::gather_rows(View x, View ids, View y) {
  if (y.n_rows() == 0) return;
  done(launch_gather_rows(mat_of(x), ints(ids), mat_of(y), stream_), "gather_rows");
}

void CudaOps::scatter_add_rows(View x, View ids, View weights, View y) {
  CACHALOT_CHECK(y.dtype == DType::f32 && x.n_cols() == y.n_cols());
  if (x.n_rows() == 0) return;
  done(launch_scatter_add_rows(mat_of(x), ints(ids), floats(weights), mat_of(y), stream_), "scatter_add_rows");
}

}  // namespace cuda

namespace {

cuda::CudaOps& impl(Ops& ops) {
  auto* found = dynamic_cast<cuda::CudaOps*>(&ops);
  CACHALOT_CHECK(found != nullptr, "{} is not CudaOps", ops.name());
  return *found;
}

}  // namespace

bool cuda_available() {
  int n = 0;
  return cudaGetDeviceCount(&n) == cudaSuccess && n > 0;
}

std::unique_ptr<Ops> make_cuda_ops(const CudaOptions& options) { return std::make_unique<cuda::CudaOps>(options); }

void cuda_synchronize(Ops& ops) { CACHALOT_CUDA_CHECK(cudaStreamSynchronize(impl(ops).stream())); }

double cuda_seconds(Ops& ops, const std::function<void()>& work) {
  const cudaStream_t stream = impl(ops).stream();
  cudaEvent_t start = nullptr, stop = nullptr;
  CACHALOT_CUDA_CHECK(cudaEventCreate(&start));
  CACHALOT_CUDA_CHECK(cudaEventCreate(&stop));
  CACHALOT_CUDA_CHECK(cudaEventRecord(start, stream));
  work();
  CACHALOT_CUDA_CHECK(cudaEventRecord(stop, stream));
  CACHALOT_CUDA_CHECK(cudaEventSynchronize(stop));
  float milliseconds = 0.0f;
  CACHALOT_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start, stop));
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  return static_cast<double>(milliseconds) * 1e-3;
}

}  // namespace cachalot
