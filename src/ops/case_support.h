// What the case files share: seeds from names, rounded random inputs, tensors owned by an instance.
#pragma once

#include <numeric>
#include <random>

#include "ops/op_cases.h"

namespace cachalot::test {

// The same for equal names, on every machine (FNV-1a).
inline uint64_t seed_of(std::string_view name) {
  uint64_t hash = 14695981039346656037ull;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash;
}

// Fills an instance: makes tensors on its device and remembers to keep them.
class CaseBuilder {
 public:
  CaseBuilder(Ops& ops, DType rounding, std::string_view name) : ops_(ops), rounding_(rounding), engine_(seed_of(name)) {}

  std::mt19937_64& engine() { return engine_; }
  uint64_t next_seed() { return engine_(); }
  int uniform(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine_); }
  std::vector<float> normals(size_t n, float scale = 1.0f) {
    std::normal_distribution<float> normal(0.0f, scale);
    std::vector<float> out(n);
    for (float& v : out) v = normal(engine_);
    return out;
  }

  // An activation array of normal values; unset when scale is 0.
  std::shared_ptr<CaseTensor> activations(int rows, int cols, float scale = 1.0f, int gap = 0) {
    return floats(ops_.activation(), rows, cols, scale, gap, rounding_);
  }
  // Likewise in f32, not rounded.
  std::shared_ptr<CaseTensor> f32(int rows, int cols, float scale = 1.0f, int gap = 0) {
    return floats(DType::f32, rows, cols, scale, gap, DType::f32);
  }
  std::shared_ptr<CaseTensor> f32(int rows, int cols, std::span<const float> values) {
    auto tensor = f32(rows, cols, 0.0f);
    tensor->set(values);
    return tensor;
  }
  std::shared_ptr<CaseTensor> ints(int rows, int cols, std::span<const int> values) {
    auto tensor = std::make_shared<CaseTensor>(ops_, DType::i32, rows, cols);
    tensor->set(values);
    instance_.keep.push_back(tensor);
    return tensor;
  }
  std::shared_ptr<CaseTensor> unset(DType dtype, int rows, int cols, int gap = 0) {
    return floats(dtype, rows, cols, 0.0f, gap, rounding_);
  }
  LinearSource source(const WeightShape& shape, std::string name = "random") {
    return SharedSources::get(shape, next_seed(), std::move(name));
  }
  Linear weights(const WeightShape& shape) {
    const LinearSource made = source(shape);
    return ops_.pack({&made, 1});
  }
  void output(std::string name, std::shared_ptr<CaseTensor> tensor, bool exact = false) {
    instance_.outputs.push_back({std::move(name), std::move(tensor), exact});
  }
  void keep(std::shared_ptr<void> what) { instance_.keep.push_back(std::move(what)); }
  CaseInstance finish(std::function<void()> call) {
    instance_.call = std::move(call);
    return std::move(instance_);
  }

 private:
  std::shared_ptr<CaseTensor> floats(DType dtype, int rows, int cols, float scale, int gap, DType rounding) {
    auto tensor = std::make_shared<CaseTensor>(ops_, dtype, rows, cols, gap);
    if (scale != 0.0f) {
      auto values = normals(static_cast<size_t>(rows) * static_cast<size_t>(cols), scale);
      for (float& v : values) v = rounded(v, rounding);
      tensor->set(values);
    }
    instance_.keep.push_back(tensor);
    return tensor;
  }

  Ops& ops_;
  DType rounding_;
  std::mt19937_64 engine_;
  CaseInstance instance_;
};

inline double weight_bytes(const WeightShape& shape) {
  return static_cast<double>(shape.n_matrices) * shape.out * static_cast<double>(row_bytes(shape.format, shape.in));
}
inline bool is_float(Format format) { return format == Format::f32 || format == Format::f16 || format == Format::bf16; }
inline std::vector<Format> all_formats() {
  std::vector<Format> out;
  for (int i = 0; i < kNumFormats; ++i) out.push_back(static_cast<Format>(i));
  return out;
}
inline std::string format_name(Format format) { return std::string(info(format).name); }

}  // namespace cachalot::test
