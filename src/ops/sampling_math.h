// The arithmetic behind sampling, the same to the last bit on every device: additions, multiplications and divisions of doubles in a fixed
// order, none contracted, and sums of integers. For C++ and CUDA alike.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define CACHALOT_ANY_DEVICE __host__ __device__ inline
#else
#define CACHALOT_ANY_DEVICE inline
#endif

namespace cachalot::sampling {

CACHALOT_ANY_DEVICE double add(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}
CACHALOT_ANY_DEVICE double multiply(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}
CACHALOT_ANY_DEVICE double divide(double a, double b) {
#ifdef __CUDA_ARCH__
  return __ddiv_rn(a, b);
#else
  return a / b;
#endif
}
CACHALOT_ANY_DEVICE uint64_t bits_of(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
CACHALOT_ANY_DEVICE double from_bits(uint64_t bits) {
  double x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// The natural logarithm of a positive normal number, to about one unit in the last place: x = 2^e m, log m = 2 artanh((m - 1) / (m + 1)).
CACHALOT_ANY_DEVICE double log_of(double x) {
  constexpr double kLn2 = 0.693147180559945309417;
  const uint64_t bits = bits_of(x);
  int exponent = static_cast<int>(bits >> 52) - 1023;
  double m = from_bits((bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull);
  if (m > 1.4142135623730951) {
    m = multiply(m, 0.5);
    exponent += 1;
  }
  const double s = divide(add(m, -1.0), add(m, 1.0)), z = multiply(s, s);
  double p = 2.0 / 23;
  p = add(multiply(p, z), 2.0 / 21);
  p = add(multiply(p, z), 2.0 / 19);
  p = add(multiply(p, z), 2.0 / 17);
  p = add(multiply(p, z), 2.0 / 15);
  p = add(multiply(p, z), 2.0 / 13);
  p = add(multiply(p, z), 2.0 / 11);
  p = add(multiply(p, z), 2.0 / 9);
  p = add(multiply(p, z), 2.0 / 7);
  p = add(multiply(p, z), 2.0 / 5);
  p = add(multiply(p, z), 2.0 / 3);
  p = add(multiply(p, z), 2.0);
  return add(multiply(p, s), multiply(static_cast<double>(exponent), kLn2));
}

// exp(-behind) for behind >= 0 as a whole number of 2^-46, rounded: sums of these are the same in every order. A vocabulary of 2^17 stays
// below 2^63, and misses at most 2^-30 of the whole.
constexpr int kMassBits = 46;
CACHALOT_ANY_DEVICE uint64_t mass_of(double behind) {
  if (!(behind < 33.0)) return 0;
  constexpr double kLog2e = 1.44269504088896340736, kLn2High = 0.693147180369123816490, kLn2Low = 1.90821492927058770002e-10;
  const int k = static_cast<int>(add(multiply(behind, kLog2e), 0.5));
  const auto n = static_cast<double>(k);
  const double r = add(add(multiply(n, kLn2High), -behind), multiply(n, kLn2Low));  // in [-0.35, 0.35]
  double p = 1.0 / 479001600;
  p = add(multiply(p, r), 1.0 / 39916800);
  p = add(multiply(p, r), 1.0 / 3628800);
  p = add(multiply(p, r), 1.0 / 362880);
  p = add(multiply(p, r), 1.0 / 40320);
  p = add(multiply(p, r), 1.0 / 5040);
  p = add(multiply(p, r), 1.0 / 720);
  p = add(multiply(p, r), 1.0 / 120);
  p = add(multiply(p, r), 1.0 / 24);
  p = add(multiply(p, r), 1.0 / 6);
  p = add(multiply(p, r), 0.5);
  p = add(multiply(p, r), 1.0);
  p = add(multiply(p, r), 1.0);
  const double scaled = multiply(p, from_bits(static_cast<uint64_t>(1023 + kMassBits - k) << 52));
  return static_cast<uint64_t>(static_cast<int64_t>(add(scaled, 0.5)));
}

// Philox-4x32-10 (Salmon et al. 2011): the four words of tokens 4 group .. 4 group + 3; see sample_uniform in sampling.h.
struct Words {
  uint32_t word[4];
};
CACHALOT_ANY_DEVICE Words philox(uint64_t seed, uint64_t step, uint32_t group) {
  uint32_t c0 = group, c1 = 0, c2 = static_cast<uint32_t>(step), c3 = static_cast<uint32_t>(step >> 32);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c0, b = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}
CACHALOT_ANY_DEVICE float uniform_of(uint32_t word) { return (static_cast<float>(word >> 9) + 0.5f) * 0x1p-23f; }

// A token's entry in the race: its logit over the temperature plus a Gumbel number.
CACHALOT_ANY_DEVICE double race_entry(double logit, float uniform) { return add(logit, -log_of(-log_of(static_cast<double>(uniform)))); }
// Bounds of -log(-log u) over the values of uniform_of: u is at most 1 - 2^-24.
constexpr double kLargestGumbel = 16.64;

}  // namespace cachalot::sampling
