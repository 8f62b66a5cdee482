// CudaOps::pack: from stored bytes to the device's forms. Formats that have a record form keep their bits and are rearranged by a kernel;
// all others are decoded to bf16 (f32 where the activations are f32) on the host.
#include <algorithm>
#include <limits>

#include "base/check.h"
#include "base/float_formats.h"
#include "cuda/cuda_ops_impl.h"

namespace cachalot::cuda {
namespace {

// Small f32 matrices (routers) keep their precision: they are read in no time, and choices hang on them.
constexpr int kMaxF32Rows = 1024;

PackFrom pack_from(Format format) {
  switch (format) {
    case Format::q4_0: return PackFrom::q4_0;
    case Format::q4_1: return PackFrom::q4_1;
    case Format::q5_0: return PackFrom::q5_0;
    case Format::q8_0: return PackFrom::q8_0;
    case Format::q4_k: return PackFrom::q4_k;
    case Format::q6_k: return PackFrom::q6_k;
    case Format::int4_planar: return PackFrom::int4_planar;
    case Format::fp8_block: return PackFrom::fp8_block;
    default: return PackFrom::none;
  }
}

int padded(int in) { return (in + kRecordCols - 1) / kRecordCols * kRecordCols; }

// Raw bytes on the device for as long as the packing of a matrix takes.
class Staging {
 public:
  Staging(std::span<const std::byte> bytes, WeightFeed& feed, cudaStream_t stream) {
    if (bytes.empty()) return;
    CACHALOT_CUDA_CHECK(cudaMallocAsync(&memory_, bytes.size(), stream));
    stream_ = stream;
    feed.copy(memory_, bytes.data(), bytes.size(), stream);
  }
  ~Staging() {
    if (memory_ != nullptr) cudaFreeAsync(memory_, stream_);
  }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  [[nodiscard]] const uint8_t* data() const { return static_cast<const uint8_t*>(memory_); }

 private:
  void* memory_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

}  // namespace

Tile CudaOps::tile_for(const LinearSource& source) const {
  if (options_.activation == DType::f32) return Tile::f32;
  if (!source.perm.empty()) return Tile::bf16;
  switch (source.format) {
    case Format::f32: return source.n_matrices() == 1 && source.out <= kMaxF32Rows ? Tile::f32 : Tile::bf16;
    case Format::q4_0:
    case Format::q4_1:
    case Format::q4_k: return Tile::q4g32;
    case Format::q5_0: return Tile::q5g32;
    case Format::q6_k: return Tile::q6g16;
    case Format::q8_0: return Tile::q8g32;
    case Format::fp8_block: return Tile::f8;
    case Format::int4_planar:
      if (source.group % 128 == 0) return Tile::q4g128;
      return source.group % 64 == 0 ? Tile::q4g64 : source.group == 32 ? Tile::q4g32 : Tile::bf16;
    default: return Tile::bf16;
  }
}

// Decodes one matrix on the host, a slice of rows at a time.
void CudaOps::pack_dense(const LinearSource& source, const Segment& segment, int matrix) {
  const auto in = static_cast<size_t>(source.in), cols = static_cast<size_t>(segment.cols);
  const bool wide = segment.tile == Tile::f32;
  const size_t element = wide ? 4 : 2;
  auto* to = const_cast<uint8_t*>(segment.data) + matrix * segment.matrix_bytes;
  if (source.format == Format::bf16 && !wide) {
    if (cols == in)
      return feed_.copy(to, source.matrices[static_cast<size_t>(matrix)].data.data(), in * element * static_cast<size_t>(source.out),
                        stream_);
    CACHALOT_CUDA_CHECK(cudaMemcpy2DAsync(to, cols * element, source.matrices[static_cast<size_t>(matrix)].data.data(), in * element,
                                          in * element, static_cast<size_t>(source.out), cudaMemcpyHostToDevice, stream_));
    return;
  }
  const int rows_at_once = std::max(1, static_cast<int>((size_t{16} << 20) / (cols * element)));
  std::vector<float> row(in), ordered(in), f32;
  std::vector<uint16_t> b16;
  for (int begin = 0; begin < source.out; begin += rows_at_once) {
    const int n = std::min(rows_at_once, source.out - begin);
    const size_t total = static_cast<size_t>(n) * cols;
    if (wide)
      f32.assign(total, 0.0f);
    else
      b16.assign(total, 0);
    for (int r = 0; r < n; ++r) {
      dequant_row(source, matrix, begin + r, row.data());
      for (size_t k = 0; k < source.perm.size(); ++k) ordered[static_cast<size_t>(source.perm[k])] = row[k];
      const float* values = source.perm.empty() ? row.data() : ordered.data();
      const size_t at = static_cast<size_t>(r) * cols;
      if (wide)
        std::copy_n(values, in, f32.data() + at);
      else
        std::transform(values, values + in, b16.data() + at, f32_to_bf16);
    }
    feed_.copy(to + static_cast<size_t>(begin) * cols * element, wide ? static_cast<const void*>(f32.data()) : b16.data(), total * element,
               stream_);
  }
}

void CudaOps::pack_segment(const LinearSource& source, const Segment& segment) {
  for (int m = 0; m < source.n_matrices(); ++m) {
    if (!is_record(segment.tile)) {
      pack_dense(source, segment, m);
      continue;
    }
    const WeightBytes& bytes = source.matrices[static_cast<size_t>(m)];
    const Staging data(bytes.data, feed_, stream_), scales(bytes.scales, feed_, stream_), zeros(bytes.zeros, feed_, stream_);
    const PackArgs args{.data = data.data(),
                        .scales = scales.data(),
                        .zeros = zeros.data(),
                        .from = pack_from(source.format),
                        .out = source.out,
                        .in = source.in,
                        .group = source.group,
                        .row_bytes = static_cast<int64_t>(row_bytes(source.format, source.in)),
                        .to = const_cast<uint8_t*>(segment.data) + m * segment.matrix_bytes,
                        .tile = segment.tile};
    done(launch_pack(args, stream_), "pack");
  }
}

void CudaOps::pack_halves(std::span<const LinearSource> sources, CudaPacked& packed) {
  const Segment& whole = packed.segments[0];
  const int cols = padded(whole.in);
  const int64_t bytes = segment_matrix_bytes(Tile::bf16, whole.out, cols);
  std::vector<uint16_t> high(static_cast<size_t>(bytes) / 2), low(high.size());
  std::vector<float> row(static_cast<size_t>(whole.in));
  size_t at = 0;
  for (const LinearSource& s : sources) {
    for (int r = 0; r < s.out; ++r, at += static_cast<size_t>(cols)) {
      dequant_row(s, 0, r, row.data());
      for (size_t k = 0; k < row.size(); ++k) {
        high[at + k] = f32_to_bf16(row[k]);
        low[at + k] = f32_to_bf16(row[k] - bf16_to_f32(high[at + k]));
      }
    }
  }
  for (const auto* half : {&high, &low}) {
    packed.memory.push_back(alloc(static_cast<size_t>(bytes)));
    packed.n_bytes += static_cast<size_t>(bytes);
    upload(packed.memory.back().get(), half->data(), static_cast<size_t>(bytes));
    packed.halves.push_back({static_cast<const uint8_t*>(packed.memory.back().get()), Tile::bf16, whole.out, whole.in, cols, bytes});
  }
}

Linear CudaOps::pack(std::span<const LinearSource> row_segments) {
  not_in_forward("packing");
  CACHALOT_CHECK(!row_segments.empty());
  const LinearSource& first = row_segments[0];
  auto packed = std::make_shared<CudaPacked>();
  packed->owner = this;
  int64_t out = 0;
  bool has_bias = false, one_form = true, aligned = true;
  for (const LinearSource& s : row_segments) {
    validate(s);
    if (s.in != first.in) fail("{}: found an input of {}, expected {} as in {}", s.name, s.in, first.in, first.name);
    if (s.n_matrices() != first.n_matrices())
      fail("{}: found {} matrices, expected {} as in {}", s.name, s.n_matrices(), first.n_matrices(), first.name);
    out += s.out;
    has_bias = has_bias || !s.bias.empty();
    one_form = one_form && tile_for(s) == tile_for(first);
    aligned = aligned && (!is_record(tile_for(s)) || s.out % kRecordRows == 0);
  }
  if (out > std::numeric_limits<int>::max()) fail("{}: found more rows than an int counts", first.name);

  // Segments of one form become one matrix, so that one launch does them all.
  const bool merged = one_form && (aligned || row_segments.size() == 1);
  const auto add = [&](Tile tile, int rows) {
    const int cols = tile == Tile::f32 ? first.in : padded(first.in);
    const int64_t matrix_bytes = segment_matrix_bytes(tile, rows, cols);
    const size_t bytes = static_cast<size_t>(matrix_bytes) * static_cast<size_t>(first.n_matrices());
    packed->memory.push_back(alloc(bytes));
    packed->n_bytes += bytes;
    packed->segments.push_back({static_cast<const uint8_t*>(packed->memory.back().get()), tile, rows, first.in, cols, matrix_bytes});
  };
  if (merged) add(tile_for(first), static_cast<int>(out));
  std::vector<float> bias(has_bias ? static_cast<size_t>(out) : 0);
  int row = 0;
  for (const LinearSource& s : row_segments) {
    if (!merged) add(tile_for(s), s.out);
    Segment part = packed->segments.back();
    if (merged) part.data += segment_matrix_bytes(part.tile, row, part.cols);
    pack_segment(s, part);
    std::copy(s.bias.begin(), s.bias.end(), bias.begin() + (has_bias ? row : 0));
    row += s.out;
  }
  if (options_.activation == DType::bf16 && packed->segments.size() == 1 && packed->segments[0].tile == Tile::f32)
    pack_halves(row_segments, *packed);
  if (has_bias) {
    packed->bias = alloc(bias.size() * sizeof(float));
    upload(packed->bias.get(), bias.data(), bias.size() * sizeof(float));
    packed->n_bytes += bias.size() * sizeof(float);
  }
  CACHALOT_CUDA_CHECK(cudaStreamSynchronize(stream_));
  return {static_cast<int>(out), first.in, first.n_matrices(), 0, packed};
}

}  // namespace cachalot::cuda
