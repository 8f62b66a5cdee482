// Scales out of blocks, and codes into them. docs/formats.md has the places of all fields.
#include "tensor/block_codes.h"

#include <algorithm>
#include <array>

#include "base/check.h"
#include "tensor/dequant.h"

namespace cachalot {
namespace {

constexpr std::array<float, 16> kIq4LevelValues = [] {
  std::array<float, 16> out{};
  for (size_t i = 0; i < 16; ++i) out[i] = static_cast<float>(kIq4Levels[i]);
  return out;
}();

void put_nibbles(const uint8_t* codes, uint8_t* qs) {
  for (int j = 0; j < kBlock / 2; ++j) qs[j] = static_cast<uint8_t>((codes[j] & 15) | ((codes[j + kBlock / 2] & 15) << 4));
}

void put_fifth_bits(const uint8_t* codes, uint8_t* qh) {
  uint32_t bits = 0;
  for (int e = 0; e < kBlock; ++e) bits |= static_cast<uint32_t>(codes[e] >> 4 & 1) << e;
  store(qh, bits);
}

// The low two bits of q2_k and q3_k: element 32 r + l is bits 2 (r % 4) of byte 32 (r / 4) + l.
void put_pairs(const uint8_t* codes, uint8_t* qs) {
  std::fill_n(qs, kSuperBlock / 4, uint8_t{0});
  for (int e = 0; e < kSuperBlock; ++e) qs[32 * (e / 128) + e % 32] |= static_cast<uint8_t>((codes[e] & 3) << (2 * (e / 32 % 4)));
}

// The nibbles of q4_k and q5_k: run r is the low (even r) or high half of bytes 32 (r / 2) onward.
void put_run_nibbles(const uint8_t* codes, uint8_t* qs) {
  std::fill_n(qs, kSuperBlock / 2, uint8_t{0});
  for (int e = 0; e < kSuperBlock; ++e) qs[32 * (e / 64) + e % 32] |= static_cast<uint8_t>((codes[e] & 15) << (4 * (e / 32 % 2)));
}

// One bit of each element, run r in bit r of byte l.
void put_run_bits(const uint8_t* codes, int bit, uint8_t* mask) {
  std::fill_n(mask, 32, uint8_t{0});
  for (int e = 0; e < kSuperBlock; ++e) mask[e % 32] |= static_cast<uint8_t>((codes[e] >> bit & 1) << (e / 32));
}

void put_q6_k(const uint8_t* codes, uint8_t* block) {
  std::fill_n(block, 192, uint8_t{0});
  for (int e = 0; e < kSuperBlock; ++e) {
    const int half = e / 128, run = e / 32 % 4, lane = e % 32;
    block[64 * half + 32 * (run % 2) + lane] |= static_cast<uint8_t>((codes[e] & 15) << (4 * (run / 2)));
    block[128 + 32 * half + lane] |= static_cast<uint8_t>((codes[e] >> 4 & 3) << (2 * run));
  }
}

void put_bytes(const uint8_t* codes, uint8_t* block) {
  for (int e = 0; e < kBlock; ++e) block[2 + e] = static_cast<uint8_t>(codes[e] - 128);
}

}  // namespace

bool has_block_codes(Format format) {
  switch (format) {
    case Format::q4_0:
    case Format::q4_1:
    case Format::q5_0:
    case Format::q5_1:
    case Format::q8_0:
    case Format::q2_k:
    case Format::q3_k:
    case Format::q4_k:
    case Format::q5_k:
    case Format::q6_k:
    case Format::iq4_nl:
    case Format::iq4_xs: return true;
    default: return false;
  }
}

CodeInfo code_info(Format format) {
  switch (format) {
    case Format::q4_0:
    case Format::q4_1:
    case Format::q4_k: return {32, 16, nullptr};
    case Format::q5_0:
    case Format::q5_1:
    case Format::q5_k: return {32, 32, nullptr};
    case Format::q8_0: return {32, 256, nullptr};
    case Format::q2_k: return {16, 4, nullptr};
    case Format::q3_k: return {16, 8, nullptr};
    case Format::q6_k: return {16, 64, nullptr};
    case Format::iq4_nl:
    case Format::iq4_xs: return {32, 16, kIq4LevelValues.data()};
    default: break;
  }
  CACHALOT_CHECK(false, "{} has no block codes", info(format).name);
}

void read_block_grid(Format format, const std::byte* bytes, float* scale, float* offset) {
  const auto* block = reinterpret_cast<const uint8_t*>(bytes);
  const auto centred = [&](int n, float middle) {
    for (int i = 0; i < n; ++i) offset[i] = -middle * scale[i];
  };
  switch (format) {
    case Format::q4_0: scale[0] = load_f16(block); return centred(1, 8.0f);
    case Format::q5_0: scale[0] = load_f16(block); return centred(1, 16.0f);
    case Format::q8_0: scale[0] = load_f16(block); return centred(1, 128.0f);
    case Format::iq4_nl: scale[0] = load_f16(block); return centred(1, 0.0f);
    case Format::q4_1:
    case Format::q5_1:
      scale[0] = load_f16(block);
      offset[0] = load_f16(block + 2);
      return;
    case Format::q2_k:
      for (int j = 0; j < 16; ++j) {
        scale[j] = load_f16(block + 80) * static_cast<float>(block[j] & 15);
        offset[j] = -(load_f16(block + 82) * static_cast<float>(block[j] >> 4));
      }
      return;
    case Format::q3_k:
      for (int j = 0; j < 16; ++j) scale[j] = load_f16(block + 108) * static_cast<float>(q3_k_scale(block + 96, j));
      return centred(16, 4.0f);
    case Format::q4_k:
    case Format::q5_k:
      for (int j = 0; j < 8; ++j) {
        const ScaleMin s = k_scale_min(block + 4, j);
        scale[j] = load_f16(block) * static_cast<float>(s.scale);
        offset[j] = -(load_f16(block + 2) * static_cast<float>(s.minimum));
      }
      return;
    case Format::q6_k:
      for (int j = 0; j < 16; ++j) scale[j] = load_f16(block + 208) * static_cast<float>(static_cast<int8_t>(block[192 + j]));
      return centred(16, 32.0f);
    case Format::iq4_xs:
      for (int j = 0; j < 8; ++j) scale[j] = load_f16(block) * static_cast<float>(iq4_xs_scale(block, j));
      return centred(8, 0.0f);
    default: break;
  }
  CACHALOT_CHECK(false, "{} has no block codes", info(format).name);
}

void write_block_codes(Format format, const uint8_t* codes, std::byte* bytes) {
  auto* block = reinterpret_cast<uint8_t*>(bytes);
  switch (format) {
    case Format::q4_0:
    case Format::iq4_nl: return put_nibbles(codes, block + 2);
    case Format::q4_1: return put_nibbles(codes, block + 4);
    case Format::q5_0: put_fifth_bits(codes, block + 2); return put_nibbles(codes, block + 6);
    case Format::q5_1: put_fifth_bits(codes, block + 4); return put_nibbles(codes, block + 8);
    case Format::q8_0: return put_bytes(codes, block);
    case Format::q2_k: return put_pairs(codes, block + 16);
    case Format::q3_k: put_run_bits(codes, 2, block); return put_pairs(codes, block + 32);
    case Format::q4_k: return put_run_nibbles(codes, block + 16);
    case Format::q5_k: put_run_bits(codes, 4, block + 16); return put_run_nibbles(codes, block + 48);
    case Format::q6_k: return put_q6_k(codes, block);
    case Format::iq4_xs:
      for (int s = 0; s < 8; ++s) put_nibbles(codes + kBlock * s, block + 8 + 16 * s);
      return;
    default: break;
  }
  CACHALOT_CHECK(false, "{} has no block codes", info(format).name);
}

}  // namespace cachalot
