// CpuOps in packed files: a packed Linear as bytes, and back. The description says what each segment is; its layout follows from that and
// is not taken from the file, so that no kernel can be led outside its buffer.
#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "cpu/cpu_ops_impl.h"
#include "cpu/wide_pack.h"

namespace cachalot::cpu {
namespace {

constexpr int kMaxDim = 1 << 30, kMaxMatrices = 1 << 16, kMaxSegments = 16;

// Numbers as they lie in memory: a pack is read on the byte order that wrote it, or refused.
class ByteWriter {
 public:
  template <typename T>
  void put(const T& value) {
    put_all(std::span(&value, 1));
  }
  template <typename T>
  void put_all(std::span<const T> values) {
    const auto bytes = std::as_bytes(values);
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  template <typename T>
  T get() {
    T value{};
    copy(&value, sizeof value);
    return value;
  }
  int number(const char* what, int low, int high) {
    const auto value = get<int32_t>();
    if (value < low || value > high) fail("{}: found {}, expected {} to {}", what, value, low, high);
    return value;
  }
  template <typename T>
  std::vector<T> list(size_t n) {
    if (n > bytes_.size() / sizeof(T)) fail("a list of {} numbers in {} bytes", n, bytes_.size());
    std::vector<T> values(n);
    copy(values.data(), n * sizeof(T));
    return values;
  }
  [[nodiscard]] bool empty() const { return bytes_.empty(); }

 private:
  void copy(void* to, size_t n) {
    if (n > bytes_.size()) fail("the description is cut short");
    if (n > 0) std::memcpy(to, bytes_.data(), n);
    bytes_ = bytes_.subspan(n);
  }
  std::span<const std::byte> bytes_;
};

bool is_planar(Codec codec) { return codec == Codec::int4 || codec == Codec::int8; }

void check_perm(const std::vector<int32_t>& perm, int in) {
  if (perm.empty()) return;
  if (perm.size() != static_cast<size_t>(in)) fail("a column order of {} entries, expected {}", perm.size(), in);
  std::vector<bool> seen(perm.size());
  for (const int32_t column : perm) {
    if (column < 0 || column >= in || seen[static_cast<size_t>(column)]) fail("column {} in the column order of {}", column, in);
    seen[static_cast<size_t>(column)] = true;
  }
}

Segment read_segment(ByteReader& bytes, const CpuPacked& w, const WideKernels* wide) {
  Segment s;
  s.codec = static_cast<Codec>(bytes.number("codec", 0, kNumCodecs - 1));
  s.wide = bytes.number("wide", 0, 1) == 1;
  const int n_rows = bytes.number("rows", 1, kMaxDim - w.out), group = bytes.number("group", 0, kMaxDim);
  if (s.wide && (wide == nullptr || wide->product[static_cast<int>(s.codec)] == nullptr))
    fail("a layout of codec {} that no kernel of this machine reads", static_cast<int>(s.codec));
  if (is_planar(s.codec) ? group < kChunk || group % kChunk != 0 || w.in % group != 0 : group != 0)
    fail("groups of {} in rows of {}", group, w.in);
  if (!can_lay_out(s.codec, s.wide, w.in)) fail("rows of {} of codec {}", w.in, static_cast<int>(s.codec));
  s.first_row = w.out;
  lay_out(s, n_rows, w.in, group);
  const auto n_scales = bytes.get<uint64_t>();
  const size_t scale_rows = static_cast<size_t>((n_rows + kScaleBlock - 1) / kScaleBlock);
  const size_t expected =
      s.codec == Codec::fp8 && !s.wide ? static_cast<size_t>(w.n_matrices) * scale_rows * static_cast<size_t>(s.scale_stride) : size_t{0};
  if (n_scales != expected) fail("{} scales, expected {}", n_scales, expected);
  s.scales = bytes.list<float>(n_scales);
  const auto n_bias = bytes.get<uint64_t>(), n_perm = bytes.get<uint64_t>();
  if (n_bias != 0 && n_bias != static_cast<uint64_t>(n_rows)) fail("{} biases, expected {}", n_bias, n_rows);
  s.bias = bytes.list<float>(n_bias);
  s.perm = bytes.list<int32_t>(n_perm);
  check_perm(s.perm, w.in);
  return s;
}

}  // namespace

std::string CpuOps::packed_layout() const {
  uint64_t codecs = 0;
  if (const WideKernels* wide = wide_kernels())
    for (int c = 0; c < kNumCodecs; ++c) codecs |= static_cast<uint64_t>(wide->product[c] != nullptr) << c;
  return fmt::format("cpu layout {}, wide codecs {:x}", kPackedLayout, codecs);
}

PackedImage CpuOps::packed_image(const Linear& w) const {
  const CpuPacked& packed = packed_of(w);
  PackedImage image;
  ByteWriter bytes;
  bytes.put<int32_t>(packed.in);
  bytes.put<int32_t>(packed.n_matrices);
  bytes.put(static_cast<int32_t>(packed.segments.size()));
  for (const Segment& s : packed.segments) {
    bytes.put(static_cast<int32_t>(s.codec));
    bytes.put<int32_t>(s.wide ? 1 : 0);
    bytes.put<int32_t>(s.n_rows);
    bytes.put<int32_t>(is_planar(s.codec) ? s.block_elems : 0);
    bytes.put<uint64_t>(s.scales.size());
    bytes.put_all(std::span<const float>(s.scales));
    bytes.put<uint64_t>(s.bias.size());
    bytes.put<uint64_t>(s.perm.size());
    bytes.put_all(std::span<const float>(s.bias));
    bytes.put_all(std::span<const int32_t>(s.perm));
    image.buffers.emplace_back(s.data.get(), s.matrix_bytes * static_cast<size_t>(packed.n_matrices));
  }
  image.description = bytes.take();
  return image;
}

Linear CpuOps::from_image(std::span<const std::byte> description, std::span<const size_t> buffer_bytes, const FillBuffer& fill) {
  ByteReader bytes(description);
  auto packed = std::make_shared<CpuPacked>();
  packed->in = bytes.number("columns", 1, kMaxDim);
  packed->n_matrices = bytes.number("matrices", 1, kMaxMatrices);
  const int n_segments = bytes.number("segments", 1, kMaxSegments);
  if (buffer_bytes.size() != static_cast<size_t>(n_segments)) fail("{} buffers, expected {}", buffer_bytes.size(), n_segments);
  for (int i = 0; i < n_segments; ++i) {
    Segment s = read_segment(bytes, *packed, wide_kernels());
    const auto n = static_cast<size_t>(packed->n_matrices), size = buffer_bytes[static_cast<size_t>(i)];
    if (size % n != 0 || size / n != s.matrix_bytes) fail("a buffer of {} bytes, expected {} times {}", size, n, s.matrix_bytes);
    add_segment(*packed, std::move(s));
  }
  if (!bytes.empty()) fail("bytes behind the description");
  for (size_t i = 0; i < packed->segments.size(); ++i) {
    Segment& s = packed->segments[i];
    s.data = weights_.take(buffer_bytes[i]);
    fill(i, {s.data.get(), buffer_bytes[i]});
  }
  return {.out = packed->out, .in = packed->in, .n_matrices = packed->n_matrices, .first = 0, .packed = packed};
}

}  // namespace cachalot::cpu
