// Loading cuBLASLt and choosing an algorithm once per shape.
#include "cuda/cublas_lt.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <array>
#include <map>

#include "cuda/context.h"

namespace cachalot::cuda {
namespace {

constexpr size_t kWorkspace = size_t{32} << 20;

struct Api {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtDestroy) destroy;
  decltype(&cublasLtMatmulDescCreate) desc_create;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmul) matmul;
};

template <typename F>
bool find(void* library, const char* name, F& to) {
  to = reinterpret_cast<F>(dlsym(library, name));
  return to != nullptr;
}

bool load_api(Api& api) {
  void* library = nullptr;
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so", "/usr/local/cuda/lib64/libcublasLt.so"})
    if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  return library != nullptr && find(library, "cublasLtCreate", api.create) && find(library, "cublasLtDestroy", api.destroy) &&
         find(library, "cublasLtMatmulDescCreate", api.desc_create) && find(library, "cublasLtMatmulDescSetAttribute", api.desc_set) &&
         find(library, "cublasLtMatrixLayoutCreate", api.layout_create) &&
         find(library, "cublasLtMatmulPreferenceCreate", api.preference_create) &&
         find(library, "cublasLtMatmulPreferenceSetAttribute", api.preference_set) &&
         find(library, "cublasLtMatmulAlgoGetHeuristic", api.heuristic) && find(library, "cublasLtMatmul", api.matmul);
}

// A chosen algorithm with its descriptors; lives as long as the process needs them.
struct Plan {
  bool usable = false;
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t w = nullptr, x = nullptr, y = nullptr;
  cublasLtMatmulAlgo_t algo{};
};

class Loaded final : public CublasLt {
 public:
  explicit Loaded(const Api& api) : api_(api) {
    usable_ = api_.create(&handle_) == CUBLAS_STATUS_SUCCESS && cudaMalloc(&workspace_, kWorkspace) == cudaSuccess;
  }
  ~Loaded() override {
    if (handle_ != nullptr) api_.destroy(handle_);
    cudaFree(workspace_);
  }
  bool multiply(const GemmArgs& a, cudaStream_t stream) override {
    if (!usable_ || a.bias != nullptr) return false;
    return run(a, plan_for(a, CUDA_R_16BF, nullptr, nullptr), a.w.data + a.first_matrix * a.w.matrix_bytes, a.x, stream);
  }
  bool multiply_fp8(const GemmArgs& a, const Fp8Rows& w, const Fp8Rows& x, cudaStream_t stream) override {
    if (!usable_ || a.bias != nullptr) return false;
    Plan& plan = plan_for(a, CUDA_R_8F_E4M3, w.scales, x.scales);
    return plan.usable && set_scales(plan, w.scales, x.scales) && run(a, plan, w.codes, x.codes, stream);
  }

 private:
  bool set_scales(const Plan& p, const float* w, const float* x) {
    return api_.desc_set(p.desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &w, sizeof w) == CUBLAS_STATUS_SUCCESS &&
           api_.desc_set(p.desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &x, sizeof x) == CUBLAS_STATUS_SUCCESS;
  }
  bool run(const GemmArgs& a, const Plan& plan, const void* w, const void* x, cudaStream_t stream) {
    const float alpha = 1.0f;
    return plan.usable && api_.matmul(handle_, plan.desc, &alpha, w, plan.w, x, plan.x, &a.beta, a.y, plan.y, a.y, plan.y, &plan.algo,
                                      workspace_, kWorkspace, stream) == CUBLAS_STATUS_SUCCESS;
  }
  // Column-major, as the library sees it: y^T [out, T] = w^T' [out, cols] x^T [cols, T].
  Plan& plan_for(const GemmArgs& a, cudaDataType_t type, const float* w_scale, const float* x_scale) {
    const std::array<int64_t, 8> key{a.w.out, a.w.cols, a.n_rows, a.x_stride, a.y_stride, a.y_is_f32, a.beta != 0.0f, type};
    const auto [at, added] = plans_.try_emplace(key);
    Plan& p = at->second;
    if (!added) return p;
    const auto rows = static_cast<uint64_t>(a.w.out), inner = static_cast<uint64_t>(a.w.cols), cols = static_cast<uint64_t>(a.n_rows);
    const cublasOperation_t transposed = CUBLAS_OP_T;
    cublasLtMatmulPreference_t preference = nullptr;
    cublasLtMatmulHeuristicResult_t result{};
    int found = 0;
    const size_t workspace = kWorkspace;
    const bool fp8 = type == CUDA_R_8F_E4M3;
    const int32_t w_scales = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F, x_scales = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    p.usable =
        api_.desc_create(&p.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS &&
        api_.desc_set(p.desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed) == CUBLAS_STATUS_SUCCESS &&
        (!fp8 || (api_.desc_set(p.desc, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &w_scales, sizeof w_scales) == CUBLAS_STATUS_SUCCESS &&
                  api_.desc_set(p.desc, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &x_scales, sizeof x_scales) == CUBLAS_STATUS_SUCCESS &&
                  set_scales(p, w_scale, x_scale))) &&  // the choice fails without them
        api_.layout_create(&p.w, type, inner, rows, static_cast<int64_t>(inner)) == CUBLAS_STATUS_SUCCESS &&
        api_.layout_create(&p.x, type, inner, cols, a.x_stride) == CUBLAS_STATUS_SUCCESS &&
        api_.layout_create(&p.y, a.y_is_f32 ? CUDA_R_32F : CUDA_R_16BF, rows, cols, a.y_stride) == CUBLAS_STATUS_SUCCESS &&
        api_.preference_create(&preference) == CUBLAS_STATUS_SUCCESS &&
        api_.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace) == CUBLAS_STATUS_SUCCESS &&
        api_.heuristic(handle_, p.desc, p.w, p.x, p.y, p.y, preference, 1, &result, &found) == CUBLAS_STATUS_SUCCESS && found > 0 &&
        result.state == CUBLAS_STATUS_SUCCESS;
    p.algo = result.algo;
    return p;
  }

  Api api_;
  bool usable_ = false;
  cublasLtHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
  std::map<std::array<int64_t, 8>, Plan> plans_;
};

}  // namespace

std::unique_ptr<CublasLt> CublasLt::load() {
  Api api{};
  if (!load_api(api)) return nullptr;
  return std::make_unique<Loaded>(api);
}

}  // namespace cachalot::cuda
