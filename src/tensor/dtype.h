// DType: the element types that activations, caches and index arrays are held in. (Weights have a Format instead.)
#pragma once

#include <cstddef>
#include <cstdint>

namespace cachalot {

enum class DType : uint8_t { f32, f16, bf16, i32, u8 };

constexpr size_t size_of(DType type) {
  switch (type) {
    case DType::f32:
    case DType::i32: return 4;
    case DType::f16:
    case DType::bf16: return 2;
    case DType::u8: return 1;
  }
  return 0;
}
constexpr const char* name_of(DType type) {
  switch (type) {
    case DType::f32: return "f32";
    case DType::f16: return "f16";
    case DType::bf16: return "bf16";
    case DType::i32: return "i32";
    case DType::u8: return "u8";
  }
  return "?";
}

}  // namespace cachalot
