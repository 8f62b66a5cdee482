// Blocks are random bytes whose scale fields are then set to values of a sensible size. Layouts: see tensor/format.h.
#include "ops/random_weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <utility>

#include "base/check.h"
#include "base/float_formats.h"

namespace cachalot::test {
namespace {

class BlockMaker {
 public:
  BlockMaker(Format format, double target, uint64_t seed) : format_(format), target_(target), engine_(seed) {}

  // One block at `b`, of info(format).block_bytes bytes.
  void make(uint8_t* b) {
    const int bytes = info(format_).block_bytes;
    for (int i = 0; i < bytes; i += 8) {
      const uint64_t random = engine_();
      std::memcpy(b + i, &random, static_cast<size_t>(std::min(8, bytes - i)));
    }
    switch (format_) {
      case Format::f32: put_f32(b, normal()); break;
      case Format::f16: put_f16(b, normal()); break;
      case Format::bf16: put_bf16(b, normal()); break;
      case Format::q4_0: put_f16(b, sign() * scale(4.6)); break;
      case Format::q4_1: put_scale_min(b, 4.6, -7.5); break;
      case Format::q5_0: put_f16(b, sign() * scale(9.2)); break;
      case Format::q5_1: put_scale_min(b, 9.2, -15.5); break;
      case Format::q8_0: put_q8_0(b); break;
      case Format::q2_k: put_scale_min(b + 80, 10.0, 1.5); break;
      case Format::q3_k: put_f16(b + 108, scale(42.0)); break;
      case Format::q4_k: put_scale_min(b, 170.0, 7.5); break;
      case Format::q5_k: put_scale_min(b, 340.0, 15.5); break;
      case Format::q6_k: put_f16(b + 208, scale(1370.0)); break;
      case Format::iq4_nl: put_f16(b, sign() * scale(70.0)); break;
      case Format::iq4_xs: put_f16(b, scale(1300.0)); break;
      case Format::mxfp4: b[0] = static_cast<uint8_t>(127 + std::lround(std::log2(scale(2.9)))); break;
      case Format::fp8_block:
        if ((b[0] & 0x7f) == 0x7f) b[0] ^= 1;  // would not be a number
        break;
      case Format::int4_planar:
      case Format::int8_planar: break;
    }
  }
  // Between half and one and a half times what makes codes of that size the target.
  double scale(double code_size) { return target_ / code_size * (0.5 + std::uniform_real_distribution<double>()(engine_)); }
  // A zero point near the middle of codes of `bits` bits.
  uint8_t zero(int bits) {
    const int middle = 1 << (bits - 1);
    return static_cast<uint8_t>(middle + std::uniform_int_distribution<int>(-middle / 4, middle / 4)(engine_));
  }
  double normal() { return target_ * std::normal_distribution<double>()(engine_); }
  std::mt19937_64& engine() { return engine_; }

 private:
  double sign() { return (engine_() & 1) != 0 ? 1.0 : -1.0; }
  static void put_f32(uint8_t* b, double value) {
    const auto f = static_cast<float>(value);
    std::memcpy(b, &f, 4);
  }
  static void put_f16(uint8_t* b, double value) {
    const uint16_t h = f32_to_f16(static_cast<float>(value));
    std::memcpy(b, &h, 2);
  }
  static void put_bf16(uint8_t* b, double value) {
    const uint16_t h = f32_to_bf16(static_cast<float>(value));
    std::memcpy(b, &h, 2);
  }
  void put_scale_min(uint8_t* b, double code_size, double minimum_per_scale) {
    const double d = scale(code_size);
    put_f16(b, d);
    put_f16(b + 2, d * minimum_per_scale);
  }
  void put_q8_0(uint8_t* b) {
    put_f16(b, scale(74.0));
    for (int i = 2; i < 34; ++i)
      if (b[i] == 0x80) b[i] = 0x81;  // quantizers stop at -127
  }

  Format format_;
  double target_;
  std::mt19937_64 engine_;
};

int default_group(int in) {
  int group = 128;
  while (in % group != 0) group /= 2;
  return group;
}

thread_local SharedSources* shared_sources = nullptr;

}  // namespace

SharedSources::SharedSources() : outer_(std::exchange(shared_sources, this)) {}
SharedSources::~SharedSources() { shared_sources = outer_; }

LinearSource SharedSources::get(const WeightShape& shape, uint64_t seed, std::string name) {
  if (shared_sources == nullptr) return random_source(shape, seed, std::move(name));
  auto& entries = shared_sources->entries_;
  auto found = std::find_if(entries.begin(), entries.end(), [&](const Entry& e) { return e.seed == seed && e.shape == shape; });
  if (found == entries.end()) found = entries.insert(found, {shape, seed, random_source(shape, seed)});
  LinearSource source = found->source;
  source.name = std::move(name);
  return source;
}

int rounded_to_blocks(Format format, int in) {
  const int block = info(format).block_elems;
  return (in + block - 1) / block * block;
}

LinearSource random_source(const WeightShape& shape, uint64_t seed, std::string name) {
  const bool planar = shape.format == Format::int4_planar || shape.format == Format::int8_planar;
  LinearSource source{.name = std::move(name), .format = shape.format, .out = shape.out, .in = shape.in};
  source.group = planar ? (shape.group != 0 ? shape.group : default_group(shape.in)) : 0;
  BlockMaker maker(shape.format, 1.0 / std::sqrt(shape.in), seed);
  const size_t block_bytes = static_cast<size_t>(info(shape.format).block_bytes),
               data_bytes = static_cast<size_t>(shape.out) * row_bytes(shape.format, shape.in);
  const auto blocks_of = [](int n) { return static_cast<size_t>((n + kFp8Block - 1) / kFp8Block); };
  const size_t groups = planar ? static_cast<size_t>(shape.out) * static_cast<size_t>(shape.in / source.group) : 0;
  for (int m = 0; m < shape.n_matrices; ++m) {
    auto data = std::make_shared<std::vector<uint8_t>>(data_bytes);
    for (size_t at = 0; at < data->size(); at += block_bytes) maker.make(data->data() + at);
    WeightBytes bytes{.data = std::as_bytes(std::span<const uint8_t>(*data))};
    source.keep_alive.push_back(data);
    if (shape.format == Format::fp8_block) {
      auto scales = std::make_shared<std::vector<float>>(blocks_of(shape.out) * blocks_of(shape.in));
      for (float& s : *scales) s = static_cast<float>(maker.scale(120.0));
      bytes.scales = std::as_bytes(std::span<const float>(*scales));
      source.keep_alive.push_back(scales);
    }
    if (planar) {
      const int bits = shape.format == Format::int4_planar ? 4 : 8;
      auto scales = std::make_shared<std::vector<uint16_t>>(groups);
      auto zeros = std::make_shared<std::vector<uint8_t>>(groups);
      for (uint16_t& s : *scales) s = f32_to_f16(static_cast<float>(maker.scale(bits == 4 ? 4.8 : 76.0)));
      for (uint8_t& z : *zeros) z = maker.zero(bits);
      bytes.scales = std::as_bytes(std::span<const uint16_t>(*scales));
      bytes.zeros = std::as_bytes(std::span<const uint8_t>(*zeros));
      source.keep_alive.push_back(scales);
      source.keep_alive.push_back(zeros);
    }
    source.matrices.push_back(bytes);
  }
  if (shape.with_bias)
    for (int r = 0; r < shape.out; ++r) source.bias.push_back(static_cast<float>(std::normal_distribution<double>()(maker.engine())));
  if (shape.permuted) {
    source.perm.resize(static_cast<size_t>(shape.in));
    std::iota(source.perm.begin(), source.perm.end(), 0);
    std::shuffle(source.perm.begin(), source.perm.end(), maker.engine());
  }
  return source;
}

}  // namespace cachalot::test
