// Times of the CUDA backend against the limits of the card, on the shape of DeepSeek-V2-Lite with random weights.
//   cuda_bench linear | moe[FORMAT] ROWS... | grouped ROWS... | ops ROWS... | few ROWS... | mla | gqa | prompts | prefill | model
//   bf16|q4_k_m|int4 CONTEXT BATCH...
// Every time is the median of replays of a graph that walks over several copies of the weights, so that the L2 cache does not help.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

#include "base/error.h"
#include "cuda/cuda_ops.h"
#include "model/decoder.h"
#include "ops/kv_codec.h"
#include "ops/random_weights.h"

namespace cachalot::test {
namespace {

constexpr double kCopyLimit = 4.3e12, kMatrixLimit = 790e12;  // measured on one H200: bytes and FLOPs per second

struct Bench {
  std::unique_ptr<Ops> ops = make_cuda_ops();
  std::vector<Buffer> keep;

  View array(DType dtype, int rows, int cols, float scale = 1.0f) {
    const size_t n = static_cast<size_t>(rows) * static_cast<size_t>(cols);
    Buffer memory = ops->alloc(n * size_of(dtype));
    if (scale != 0.0f && (dtype == DType::f32 || dtype == DType::bf16)) {
      const LinearSource values =
          random_source({.format = dtype == DType::f32 ? Format::f32 : Format::bf16, .out = std::min(rows, 256), .in = cols}, 11);
      for (int r = 0; r < rows; r += 256) {
        const size_t bytes = static_cast<size_t>(std::min(256, rows - r)) * static_cast<size_t>(cols) * size_of(dtype);
        ops->upload(static_cast<std::byte*>(memory.get()) + static_cast<size_t>(r) * static_cast<size_t>(cols) * size_of(dtype),
                    values.matrices[0].data.data(), std::min(bytes, values.matrices[0].data.size()));
      }
    }
    keep.push_back(memory);
    return View::matrix(memory.get(), dtype, rows, cols);
  }
  View ints(const std::vector<int>& values, int rows, int cols) {
    const View v = array(DType::i32, rows, cols, 0.0f);
    ops->upload(v.data, values.data(), values.size() * sizeof(int));
    return v;
  }
  // n_matrices copies of one matrix, whose rows repeat 512 random ones.
  Linear weights(Format format, int out, int in, int n_matrices = 1) {
    const int n = std::min(out, 512);
    const LinearSource part =
        random_source({.format = format, .out = n, .in = in, .group = format == Format::int4_planar ? (in % 128 == 0 ? 128 : 64) : 0}, 3);
    const auto repeat = [&](std::span<const std::byte> bytes, size_t total_rows, size_t part_rows) {
      std::vector<std::byte> all(bytes.size() / part_rows * total_rows);
      for (size_t at = 0; at < all.size(); at += bytes.size())
        std::copy_n(bytes.begin(), std::min(bytes.size(), all.size() - at), all.begin() + static_cast<ptrdiff_t>(at));
      return all;
    };
    const bool blocks = format == Format::fp8_block;
    const auto rows_of = [&](int r) { return static_cast<size_t>(blocks ? (r + 127) / 128 : r); };
    const WeightBytes& w = part.matrices[0];
    const auto data = repeat(w.data, static_cast<size_t>(out), static_cast<size_t>(n)), scales = repeat(w.scales, rows_of(out), rows_of(n)),
               zeros = repeat(w.zeros, static_cast<size_t>(out), static_cast<size_t>(n));
    LinearSource source = part;
    source.out = out;
    source.matrices.assign(static_cast<size_t>(n_matrices), {data, scales, zeros});
    return ops->pack({&source, 1});
  }
  // Median seconds of a replay.
  double time(const std::function<void()>& work, int replays = 9) {
    work();
    work();
    cuda_synchronize(*ops);
    const auto graph = ops->capture(work);
    graph->launch();
    std::vector<double> seconds;
    for (int i = 0; i < replays; ++i) seconds.push_back(cuda_seconds(*ops, [&] { graph->launch(); }));
    std::sort(seconds.begin(), seconds.end());
    return seconds[seconds.size() / 2];
  }
};

double stored_bytes(Format format, double out, double in, int group = 128) {
  if (format == Format::int4_planar) return out * in * (0.5 + 3.0 / group);
  if (format == Format::fp8_block) return out * in;
  return out * static_cast<double>(row_bytes(format, static_cast<int>(in)));
}

void bench_linear() {
  Bench b;
  std::printf("%-12s %-14s %4s %10s %8s %7s\n", "format", "out x in", "T", "us", "TB/s", "share");
  struct Shape {
    int out, in;
  };
  for (const Format format : {Format::bf16, Format::q4_k, Format::q6_k, Format::q8_0, Format::int4_planar, Format::fp8_block}) {
    for (const Shape s : {Shape{3648, 2048}, Shape{2048, 2048}, Shape{21888, 2048}, Shape{102400, 2048}}) {
      const double bytes = stored_bytes(format, s.out, s.in);
      const int copies = std::max(2, static_cast<int>(4e8 / bytes));
      const Linear w = b.weights(format, s.out, s.in, copies);
      for (const int rows : {1, 4, 8, 16, 32}) {
        const View x = b.array(DType::bf16, rows, s.in), y = b.array(DType::bf16, rows, s.out, 0.0f);
        const double t = b.time([&] {
          for (int i = 0; i < copies; ++i) b.ops->linear(x, w.matrix(i), y);
        }) / copies;
        std::printf("%-12s %6d x %-5d %4d %10.2f %8.2f %6.1f%%\n", std::string(info(format).name).c_str(), s.out, s.in, rows, t * 1e6,
                    bytes / t * 1e-12, 100 * bytes / t / kCopyLimit);
      }
    }
  }
}

std::vector<int> uniform_experts(int rows, int top_k, int n_experts, std::vector<bool>& used, uint32_t seed = 1) {
  std::vector<int> ids;
  uint32_t state = 12345 * seed;
  for (int t = 0; t < rows; ++t) {
    std::vector<int> mine;
    while (static_cast<int>(mine.size()) < top_k) {
      state = state * 1664525u + 1013904223u;
      const int e = static_cast<int>((state >> 8) % static_cast<uint32_t>(n_experts));
      if (std::find(mine.begin(), mine.end(), e) == mine.end()) mine.push_back(e), used[static_cast<size_t>(e)] = true;
    }
    ids.insert(ids.end(), mine.begin(), mine.end());
  }
  return ids;
}

void bench_moe(const std::vector<int>& batches, const std::string& only) {
  Bench b;
  constexpr int kExperts = 64, kTop = 6, kHidden = 2048, kInner = 1408, kShared = 2816, kLayers = 3;
  struct Mix {
    Format up, down, shared_up, shared_down;
  };
  std::printf("%-12s %-8s %5s %8s %10s %8s %7s %9s\n", "gate_up", "down", "T", "experts", "us", "TB/s", "share", "TFLOP/s");
  for (const Mix m :
       {Mix{Format::bf16, Format::bf16, Format::bf16, Format::bf16}, Mix{Format::q4_k, Format::q5_0, Format::q4_k, Format::q6_k},
        Mix{Format::q4_k, Format::q8_0, Format::q4_k, Format::q6_k},
        Mix{Format::int4_planar, Format::int4_planar, Format::int4_planar, Format::int4_planar},
        Mix{Format::q4_0, Format::q4_0, Format::q4_0, Format::q4_0}, Mix{Format::q8_0, Format::q8_0, Format::q8_0, Format::q8_0},
        Mix{Format::q6_k, Format::q8_0, Format::q6_k, Format::q6_k}}) {
    if (!only.empty() && only != info(m.up).name) continue;
    std::vector<Experts> layers;
    for (int l = 0; l < kLayers; ++l)
      layers.push_back({b.weights(m.up, 2 * kInner, kHidden, kExperts), b.weights(m.down, kHidden, kInner, kExperts),
                        b.weights(m.shared_up, 2 * kShared, kHidden), b.weights(m.shared_down, kHidden, kShared)});
    for (const int rows : batches) {
      std::vector<bool> used(kExperts);
      const View ids = b.ints(uniform_experts(rows, kTop, kExperts, used), rows, kTop), weights = b.array(DType::f32, rows, kTop);
      const View x = b.array(DType::bf16, rows, kHidden), y = b.array(DType::bf16, rows, kHidden, 0.0f);
      const auto n_used = static_cast<double>(std::count(used.begin(), used.end(), true));
      const double bytes = n_used * (stored_bytes(m.up, 2 * kInner, kHidden, 128) + stored_bytes(m.down, kHidden, kInner, 64)) +
                           stored_bytes(m.shared_up, 2 * kShared, kHidden) + stored_bytes(m.shared_down, kHidden, kShared);
      const double flops = 2.0 * rows * 3 * kHidden * (kTop * kInner + kShared);
      const double t = b.time([&] {
        for (const Experts& e : layers) b.ops->moe(x, e, {ids, weights}, y);
      }) / kLayers;
      std::printf("%-12s %-8s %5d %8.0f %10.2f %8.2f %6.1f%% %9.1f\n", std::string(info(m.up).name).c_str(),
                  std::string(info(m.down).name).c_str(), rows, n_used, t * 1e6, bytes / t * 1e-12, 100 * bytes / t / kCopyLimit,
                  flops / t * 1e-12);
    }
  }
}

// The routed experts alone, int4 in groups of 128, each with the same number of rows. The roof is that of the bytes or of the FLOPs.
void bench_grouped(const std::vector<int>& rows_each) {
  Bench b;
  constexpr int kExperts = 64, kTop = 6, kHidden = 2048, kInner = 1408, kLayers = 3;
  std::vector<Experts> layers(kLayers);
  for (Experts& e : layers)
    e = {b.weights(Format::int4_planar, 2 * kInner, kHidden, kExperts), b.weights(Format::int4_planar, kHidden, kInner, kExperts), {}, {}};
  const double bytes =
      kExperts * (stored_bytes(Format::int4_planar, 2 * kInner, kHidden) + stored_bytes(Format::int4_planar, kHidden, kInner));
  std::printf("%-8s %5s %10s %8s %7s %9s %7s\n", "rows", "T", "us", "TB/s", "share", "TFLOP/s", "of roof");
  const size_t kept = b.keep.size();
  for (const int each : rows_each) {
    const int pairs = each * kExperts, n = (pairs + kTop - 1) / kTop;
    std::vector<int> of_tokens(static_cast<size_t>(n * kTop), -1);
    for (int p = 0; p < pairs; ++p) of_tokens[static_cast<size_t>(p)] = p % kExperts;
    const View ids = b.ints(of_tokens, n, kTop), weights = b.array(DType::f32, n, kTop), x = b.array(DType::bf16, n, kHidden),
               y = b.array(DType::bf16, n, kHidden, 0.0f);
    const double t = b.time([&] {
      for (const Experts& e : layers) b.ops->moe(x, e, {ids, weights}, y);
    }) / kLayers;
    const double flops = 6.0 * pairs * kHidden * kInner, roof = std::max(bytes / kCopyLimit, flops / kMatrixLimit);
    std::printf("%-8d %5d %10.2f %8.2f %6.1f%% %9.1f %6.1f%%\n", each, n, t * 1e6, bytes / t * 1e-12, 100 * bytes / t / kCopyLimit,
                flops / t * 1e-12, 100 * roof / t);
    b.keep.resize(kept);
  }
}

// Sequences of equal length over a cache of their own.
struct Paged {
  Batch batch;
  std::vector<int> q_start, kv_len;
  std::vector<KvLayer> layers;
};
// A multiple of 64 rows, which repeat.
void* fp8_rows(Bench& b, const KvLayout& layout, int rows) {
  std::mt19937 engine(5);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(layout.k_dim));
  std::vector<std::byte> some(64 * layout.k_row_bytes());
  for (size_t at = 0; at < some.size(); at += layout.k_row_bytes()) {
    for (float& v : values) v = normal(engine);
    encode_kv_row(layout, values, &some[at]);
  }
  const View pages = b.array(DType::u8, rows, static_cast<int>(layout.k_row_bytes()), 0.0f);
  for (int r = 0; r + 64 <= rows; r += 64) b.ops->upload(pages.row<std::byte>(r), some.data(), some.size());
  return pages.data;
}
std::unique_ptr<Paged> paged(Bench& b, const KvLayout& layout, int n_seqs, int n_q, int kv_len, int n_layers, bool prefill) {
  auto p = std::make_unique<Paged>();
  const int blocks = (kv_len + layout.block_tokens - 1) / layout.block_tokens, rows = n_seqs * n_q;
  std::vector<int> table, positions, slots, tokens;
  for (int s = 0; s < n_seqs; ++s) {
    for (int i = 0; i < blocks; ++i) table.push_back(i * n_seqs + s);
    for (int i = 0; i < n_q; ++i) {
      const int position = kv_len - n_q + i;
      positions.push_back(position);
      slots.push_back(table[static_cast<size_t>(s * blocks + position / layout.block_tokens)] * layout.block_tokens +
                      position % layout.block_tokens);
      tokens.push_back((s * 7919 + i * 31) % 100000);
    }
    p->q_start.push_back(s * n_q);
    p->kv_len.push_back(kv_len);
  }
  p->q_start.push_back(rows);
  Batch& batch = p->batch;
  batch.n_tokens = rows, batch.n_seqs = n_seqs, batch.max_q = n_q, batch.max_kv = kv_len;
  (prefill ? batch.prefill : batch.decode) = {0, rows, 0, n_seqs};
  batch.tokens = b.ints(tokens, 1, rows);
  batch.positions = b.ints(positions, 1, rows);
  batch.slots = b.ints(slots, 1, rows);
  batch.q_start = b.ints(p->q_start, 1, n_seqs + 1);
  batch.kv_len = b.ints(p->kv_len, 1, n_seqs);
  batch.block_table = b.ints(table, n_seqs, blocks);
  std::vector<int> last;
  for (int s = 0; s < n_seqs; ++s) last.push_back((s + 1) * n_q - 1);
  batch.logit_rows = b.ints(last, 1, n_seqs);
  batch.host_q_start = p->q_start;
  batch.host_kv_len = p->kv_len;
  const int cache_rows = n_seqs * blocks * layout.block_tokens;
  for (int l = 0; l < n_layers; ++l)
    p->layers.push_back({layout,
                         layout.format == KvFormat::fp8 ? fp8_rows(b, layout, cache_rows)
                                                        : b.array(DType::bf16, cache_rows, layout.heads * layout.k_dim).data,
                         layout.v_is_k_prefix ? nullptr : b.array(DType::bf16, cache_rows, layout.heads * layout.v_dim).data});
  return p;
}

constexpr KvLayout kMla{.heads = 1, .k_dim = 576, .v_dim = 512, .v_is_k_prefix = true, .format = KvFormat::bf16, .block_tokens = 64};

void bench_mla() {
  std::printf("%-6s %-6s %6s %7s %10s %8s %7s %9s\n", "rows", "heads", "batch", "ctx", "us", "TB/s", "share", "TFLOP/s");
  for (const KvFormat format : {KvFormat::bf16, KvFormat::fp8})
    for (const int heads : {16, 128})
      for (const int n : {1, 8, 24, 64, 128}) {
        Bench b;
        constexpr int kContext = 4096;
        KvLayout layout = kMla;
        layout.format = format;
        const int copies = std::clamp(512 / n, 4, 16);
        const auto p = paged(b, layout, n, 1, kContext, copies, false);
        const View q = b.array(DType::bf16, n, heads * 576), out = b.array(DType::bf16, n, heads * 512, 0.0f);
        const double t = b.time([&] {
          for (const KvLayer& kv : p->layers) b.ops->attend({kv, &p->batch, p->batch.decode, 0.07f}, q, out);
        }) / copies;
        const double bytes = static_cast<double>(n) * kContext * static_cast<double>(layout.token_bytes()),
                     flops = 2.0 * n * heads * kContext * (576 + 512);
        std::printf("%-6s %-6d %6d %7d %10.2f %8.2f %6.1f%% %9.1f\n", name_of(format), heads, n, kContext, t * 1e6, bytes / t * 1e-12,
                    100 * bytes / t / kCopyLimit, flops / t * 1e-12);
      }
}

// Separate keys and values.
void bench_gqa() {
  std::printf("%-14s %6s %7s %10s %8s %7s\n", "heads", "batch", "ctx", "us", "TB/s", "share");
  struct Shape {
    int heads, kv_heads, dim;
  };
  for (const Shape shape : {Shape{9, 3, 64}, Shape{14, 2, 64}, Shape{32, 8, 128}, Shape{16, 16, 128}})
    for (const int n : {1, 8, 64})
      for (const int context : {256, 4096}) {
        Bench b;
        const KvLayout layout{
            .heads = shape.kv_heads, .k_dim = shape.dim, .v_dim = shape.dim, .format = KvFormat::bf16, .block_tokens = 64};
        const double bytes = static_cast<double>(n) * context * static_cast<double>(layout.token_bytes());
        const int copies = std::clamp(static_cast<int>(4e8 / bytes), 1, 24);
        const auto p = paged(b, layout, n, 1, context, copies, false);
        const View q = b.array(DType::bf16, n, shape.heads * shape.dim), out = b.array(DType::bf16, n, shape.heads * shape.dim, 0.0f);
        const double t = b.time([&] {
          for (const KvLayer& kv : p->layers) b.ops->attend({kv, &p->batch, p->batch.decode, 0.1f}, q, out);
        }) / copies;
        char name[32];
        std::snprintf(name, sizeof name, "%d of %d x %d", shape.heads, shape.kv_heads, shape.dim);
        std::printf("%-14s %6d %7d %10.2f %8.2f %6.1f%%\n", name, n, context, t * 1e6, bytes / t * 1e-12, 100 * bytes / t / kCopyLimit);
      }
}

// ---- the whole model ----
struct Model {
  Config config;
  std::vector<Layer> layers;
  Linear embed, lm_head;
  Constant final_norm, rope_table;
  Rope rope;
  double bytes_fixed = 0, bytes_expert = 0;  // stored bytes read per step whatever the routing; of one routed expert, over all MoE layers
};

Model make_model(Bench& b, const std::string& mix) {
  Model m;
  Config& c = m.config;
  c.n_layers = 27, c.hidden = 2048, c.vocab = 102400, c.n_heads = 16;
  c.kv_rank = 512, c.nope = 128, c.v_dim = 128, c.q_rank = 0, c.rms_eps = 1e-6f, c.softmax_scale = 0.1147f;
  c.rope.dim = 64, c.n_experts = 64;
  c.router = {.n_experts = 64, .top_k = 6};
  const bool k_quant = mix == "q4_k_m", int4 = mix == "int4";
  const Format main = k_quant ? Format::q4_k : int4 ? Format::int4_planar : Format::bf16;
  const Format head = k_quant ? Format::q6_k : int4 ? Format::int4_planar : Format::bf16;
  const auto fixed = [&](Format f, int out, int in, int n = 1, bool count = true) {
    if (count) m.bytes_fixed += n * stored_bytes(f, out, in, in % 128 == 0 ? 128 : 64);
    return b.weights(f, out, in, n);
  };
  const std::vector<float> ones(2048, 1.0f);
  const auto norm = [&](int n) { return b.ops->constant({ones.data(), static_cast<size_t>(n)}, 1, n); };
  for (int l = 0; l < c.n_layers; ++l) {
    Layer layer;
    layer.attn_norm = norm(2048), layer.ffn_norm = norm(2048);
    MlaWeights a;
    a.qkv_a = fixed(main, 3072 + 576, 2048);
    a.kv_a_norm = norm(512);
    a.kv_b = fixed(Format::bf16, 16 * 256, 512, 1, false);
    a.uk_t = fixed(Format::bf16, 512, 128, 16);
    a.uv = fixed(Format::bf16, 128, 512, 16);
    a.o = fixed(main, 2048, 2048);
    layer.attn = a;
    // Q4_K_M gives half of the down projections more bits; rows of 1408 and 10944 are no whole super-blocks, so they are q5_0 and q8_0.
    const bool more = l < 3 || l >= 24 || (l - 3) % 3 == 2;
    if (l == 0) {
      layer.ffn = DenseFfn{fixed(main, 2 * 10944, 2048), fixed(k_quant ? Format::q8_0 : main, 2048, 10944)};
    } else {
      MoeFfn f;
      f.router = fixed(Format::f32, 64, 2048);
      const Format down = k_quant ? (more ? Format::q8_0 : Format::q5_0) : main;
      f.experts = {b.weights(main, 2816, 2048, 64), b.weights(down, 2048, 1408, 64), fixed(main, 5632, 2048),
                   fixed(k_quant ? (more ? Format::q6_k : Format::q4_k) : main, 2048, 2816)};
      m.bytes_expert += stored_bytes(main, 2816, 2048) + stored_bytes(down, 2048, 1408, 128);
      layer.ffn = f;
    }
    m.layers.push_back(std::move(layer));
  }
  m.embed = b.weights(main, c.vocab, 2048);
  m.lm_head = fixed(head, c.vocab, 2048);
  m.final_norm = norm(2048);
  std::vector<float> table(static_cast<size_t>(16384) * 64, 0.7f);
  m.rope_table = b.ops->constant(table, 16384, 64);
  m.rope = {64, true, m.rope_table.view};
  return m;
}

// Random weights would send all rows to the same few experts, which flatters batches: the choice is made and thrown away, and uniform
// choices, other ones in each layer, are used.
void ffn_uniform(const Step& step, const Constant& norm, const MoeFfn& w, const Constant& next_norm, View x, View xn, View y,
                 const Routing& uniform) {
  Ops& o = step.ops;
  const Scope scope(o);
  const Config& c = step.config;
  const Routing chosen{o.temp(DType::i32, x.n_rows(), c.router.top_k), o.temp(DType::f32, x.n_rows(), c.router.top_k)};
  o.moe_prologue({x, y, norm.view, c.rms_eps, xn, &w.router, w.router_bias.view, c.router, chosen});
  o.moe_add_rmsnorm(xn, w.experts, uniform, {.residual = x, .norm = next_norm.view, .eps = c.rms_eps, .y = xn});
}

void forward(Ops& o, const Model& m, const Batch& batch, std::span<const KvLayer> kv, std::span<const Routing> uniform, View logits) {
  const Scope scope(o);
  const Config& c = m.config;
  const Step step{o, c, batch, m.rope};
  View x = o.temp(DType::f32, batch.n_tokens, c.hidden), xn = o.temp(o.activation(), batch.n_tokens, c.hidden),
       y = o.temp(o.activation(), batch.n_tokens, c.hidden);
  const int n_logits = logits.n_rows();
  o.embed(m.embed, batch.tokens, x);
  o.rmsnorm(x, m.layers[0].attn_norm.view, c.rms_eps, xn);
  for (size_t l = 0; l < m.layers.size(); ++l) {
    const Layer& layer = m.layers[l];
    const bool last = l + 1 == m.layers.size();
    if (last) y = y.rows(0, n_logits);
    std::visit([&](const auto& w) { attention(step, w, kv[l], xn, y); }, layer.attn);
    if (last && n_logits < batch.n_tokens) {
      const View all = x;
      x = o.temp(DType::f32, n_logits, c.hidden), xn = xn.rows(0, n_logits);
      o.gather_rows(all, batch.logit_rows, x);
    }
    const Constant& next_norm = last ? m.final_norm : m.layers[l + 1].attn_norm;
    const Routing routing{uniform[l].ids.rows(0, x.n_rows()), uniform[l].weights.rows(0, x.n_rows())};
    if (const auto* moe = std::get_if<MoeFfn>(&layer.ffn))
      ffn_uniform(step, layer.ffn_norm, *moe, next_norm, x, xn, y, routing);
    else
      add_ffn(step, layer.ffn_norm, layer.ffn, next_norm, x, xn, y);
  }
  if (n_logits == batch.n_tokens) {
    const View all = xn;
    xn = o.temp(o.activation(), n_logits, c.hidden);
    o.gather_rows(all, batch.logit_rows, xn);
  }
  o.linear(xn, m.lm_head, logits);
}

// Experts that T rows of 6 of 64 touch when the choice is uniform.
double expected_experts(int rows) {
  double missed = 1.0;
  for (int i = 0; i < rows; ++i) missed *= 1.0 - 6.0 / 64.0;
  return 64.0 * (1.0 - missed);
}

std::vector<Routing> uniform_routing(Bench& b, int rows, int n_layers) {
  std::vector<Routing> out;
  std::vector<bool> used(64);
  const View weights = b.array(DType::f32, rows, 6);
  for (int l = 0; l < n_layers; ++l)
    out.push_back({b.ints(uniform_experts(rows, 6, 64, used, static_cast<uint32_t>(l + 1)), rows, 6), weights});
  return out;
}

void bench_model(const std::string& mix, const std::vector<int>& batches, int context) {
  Bench b;
  const MemorySize before = b.ops->memory();
  const Model m = make_model(b, mix);
  std::printf("%s: %.2f GB of weights on the device\n", mix.c_str(), static_cast<double>(before.free - b.ops->memory().free) * 1e-9);
  std::printf("%-8s %-8s %6s %6s %10s %10s %8s %7s\n", "phase", "weights", "batch", "ctx", "ms", "tok/s", "TB/s", "share");
  for (const int n : batches) {
    const size_t kept = b.keep.size();
    const auto p = paged(b, kMla, n, 1, context, 27, false);
    const auto uniform = uniform_routing(b, n, 27);
    const View logits = b.array(DType::f32, n, m.config.vocab, 0.0f);
    const double t = b.time([&] { forward(*b.ops, m, p->batch, p->layers, uniform, logits); }, 15);
    const double bytes = m.bytes_fixed + expected_experts(n) * m.bytes_expert + static_cast<double>(n) * context * 1152 * 27;
    std::printf("%-8s %-8s %6d %6d %10.3f %10.1f %8.2f %6.1f%%\n", "decode", mix.c_str(), n, context, t * 1e3, n / t, bytes / t * 1e-12,
                100 * bytes / t / kCopyLimit);
    if (n == 1) {
      const double eager = cuda_seconds(*b.ops, [&] { forward(*b.ops, m, p->batch, p->layers, uniform, logits); });
      std::printf("         the same without a graph: %.3f ms\n", eager * 1e3);
    }
    // What a caller waits for who has the device idle and needs the result: as in a run, where tokens decide on the next step.
    const auto graph = b.ops->capture([&] { forward(*b.ops, m, p->batch, p->layers, uniform, logits); });
    std::vector<double> called, ended;
    for (int i = 0; i < 9; ++i) {
      cuda_synchronize(*b.ops);
      const auto begin = std::chrono::steady_clock::now();
      const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
      graph->launch();
      called.push_back(seconds());
      cuda_synchronize(*b.ops);
      ended.push_back(seconds());
    }
    std::sort(called.begin(), called.end());
    std::sort(ended.begin(), ended.end());
    std::printf("         alone, from the call to the end: %.3f ms; the call returns after %.0f us\n", ended[4] * 1e3, called[4] * 1e6);
    b.keep.resize(kept);
  }
  for (const int n : {1, 8}) {
    const size_t kept = b.keep.size();
    const auto p = paged(b, kMla, n, 1024, 1024, 27, true);
    const auto uniform = uniform_routing(b, n * 1024, 27);
    const View logits = b.array(DType::f32, n, m.config.vocab, 0.0f);
    const auto run = [&] { forward(*b.ops, m, p->batch, p->layers, uniform, logits); };
    run();
    run();
    std::vector<double> seconds;
    for (int i = 0; i < 5; ++i) seconds.push_back(cuda_seconds(*b.ops, run));
    std::sort(seconds.begin(), seconds.end());
    const double t = seconds[2], flops = 2.0 * (2.241e9 * n * 1024 - 73.4e6 * n * 1023 + n * 209.7e6) + 27.0 * n * 16 * 1024 * 1024 * 320;
    std::printf("%-8s %-8s %6d %6d %10.3f %10.1f %8.1f TFLOP/s %4.1f%%\n", "prefill", mix.c_str(), n, 1024, t * 1e3, n * 1024 / t,
                flops / t * 1e-12, 100 * flops / t / kMatrixLimit);
    b.keep.resize(kept);
  }
}

// Each operation of a layer by itself, 24 times in a row: what it costs in a captured step, its launch included.
void bench_ops(const std::vector<int>& batches) {
  std::printf("%-14s %5s %9s\n", "op", "T", "us");
  for (const int n : batches) {
    Bench b;
    constexpr int kRepeats = 24;
    Ops& o = *b.ops;
    const auto p = paged(b, kMla, n, 1, 1024, 1, false);
    const View x = b.array(DType::f32, n, 2048), xn = b.array(DType::bf16, n, 2048), y = b.array(DType::bf16, n, 2048),
               a = b.array(DType::bf16, n, 3648);
    const View absorbed = b.array(DType::bf16, n, 16 * 576), result = b.array(DType::bf16, n, 16 * 512),
               context = b.array(DType::bf16, n, 2048);
    const View logits = b.array(DType::f32, n, 64), ids = b.array(DType::i32, n, 6, 0.0f), weights = b.array(DType::f32, n, 6);
    const View norm = b.array(DType::f32, 1, 2048);
    const std::vector<float> table(static_cast<size_t>(4096) * 64, 0.7f);
    const Constant cos_sin = o.constant(table, 4096, 64);
    const Rope rope{64, true, cos_sin.view};
    const Linear router = b.weights(Format::f32, 64, 2048), uk = b.weights(Format::bf16, 512, 128, 16),
                 uv = b.weights(Format::bf16, 128, 512, 16);
    const View latent = a.cols(3072, 512), row = a.cols(3072, 576), q = a.cols(0, 3072);
    const auto show = [&](const char* name, const std::function<void()>& call) {
      const double t = b.time([&] {
        for (int i = 0; i < kRepeats; ++i) call();
      }) / kRepeats;
      std::printf("%-14s %5d %9.2f\n", name, n, t * 1e6);
    };
    show("rmsnorm", [&] { o.rmsnorm(latent, norm.cols(0, 512), 1e-6f, latent); });
    show("add_rmsnorm", [&] { o.add_rmsnorm(x, y, norm, 1e-6f, xn); });
    show("rope q", [&] { o.rope(q.heads(16, 192), p->batch.positions, rope); });
    show("rope k", [&] { o.rope(row.heads(1, 576), p->batch.positions, rope); });
    show("kv_write", [&] { o.kv_write(p->layers[0], p->batch, row, {}); });
    show("head_linear uk", [&] { o.head_linear(q, uk, absorbed); });
    show("attend 1024", [&] { o.attend({p->layers[0], &p->batch, p->batch.decode, 0.1f}, absorbed, result); });
    show("head_linear uv", [&] { o.head_linear(result, uv, context); });
    show("router", [&] { o.linear(xn, router, logits); });
    show("route", [&] { o.route(logits, {}, {.n_experts = 64, .top_k = 6}, {ids, weights}); });
  }
}

// The calls that take few rows in joined launches, and the same work by the default bodies of Ops, one call after the other. Each layer has
// weights and a cache of its own.
void bench_few(const std::vector<int>& batches) {
  constexpr int kLayers = 24, kContext = 1024, kHeads = 16;
  constexpr MlaDims kDims{.n_heads = kHeads, .nope = 128, .rope_dim = 64, .v_dim = 128, .kv_rank = 512};
  std::printf("%-14s %5s %10s %10s\n", "call", "T", "joined us", "apart us");
  Bench b;
  Ops& o = *b.ops;
  std::vector<Linear> uk, uv, routers;
  for (int l = 0; l < kLayers; ++l) {
    uk.push_back(b.weights(Format::bf16, 512, 128, kHeads)), uv.push_back(b.weights(Format::bf16, 128, 512, kHeads));
    routers.push_back(b.weights(Format::f32, 64, 2048));
  }
  const View norm = b.array(DType::f32, 1, 2048);
  const std::vector<float> table(static_cast<size_t>(4096) * 64, 0.7f);
  const Constant cos_sin = o.constant(table, 4096, 64);
  for (const int n : batches) {
    const size_t kept = b.keep.size();
    const auto p = paged(b, kMla, n, 1, kContext, kLayers, false);
    const View x = b.array(DType::f32, n, 2048), xn = b.array(DType::bf16, n, 2048), y = b.array(DType::bf16, n, 2048),
               a = b.array(DType::bf16, n, 3648);
    const View ids = b.array(DType::i32, n, 6, 0.0f), weights = b.array(DType::f32, n, 6);
    const auto show = [&](const char* name, const std::function<void(int)>& joined, const std::function<void(int)>& apart) {
      double us[2];
      for (const int i : {0, 1}) {
        const double t = b.time([&] {
          for (int l = 0; l < kLayers; ++l) (i == 0 ? joined : apart)(l);
        });
        us[i] = t / kLayers * 1e6;
      }
      std::printf("%-14s %5d %10.2f %10.2f\n", name, n, us[0], us[1]);
    };
    const auto absorbed = [&](int l) {
      const auto at = static_cast<size_t>(l);
      return MlaAbsorbed{.prologue = {.kv = p->layers[at],
                                      .batch = &p->batch,
                                      .dims = kDims,
                                      .q = a.cols(0, 3072),
                                      .row = a.cols(3072, 576),
                                      .norm = norm.cols(0, 512),
                                      .eps = 1e-6f,
                                      .rope = {64, true, cos_sin.view}},
                         .rows = p->batch.decode,
                         .scale = 0.1f,
                         .uk = &uk[at],
                         .uv = &uv[at]};
    };
    show(
        "mla_absorbed", [&](int l) { o.mla_absorbed(absorbed(l), y); }, [&](int l) { o.Ops::mla_absorbed(absorbed(l), y); });
    const auto prologue = [&](int l) {
      return MoePrologue{.residual = x,
                         .delta = y,
                         .norm = norm,
                         .eps = 1e-6f,
                         .y = xn,
                         .router = &routers[static_cast<size_t>(l)],
                         .how = {.n_experts = 64, .top_k = 6},
                         .out = {ids, weights}};
    };
    show(
        "moe_prologue", [&](int l) { o.moe_prologue(prologue(l)); }, [&](int l) { o.Ops::moe_prologue(prologue(l)); });
    b.keep.resize(kept);
  }
}

// Attention of prompts: all of the expanded form (pages laid out, W_UKV, attention), and attention alone. FLOPs are those of the pairs that
// see each other.
void bench_prompts() {
  std::printf("%6s %6s %7s %7s %12s %9s %7s %12s %9s %7s\n", "heads", "batch", "rows", "context", "expanded us", "TFLOP/s", "share",
              "attention us", "TFLOP/s", "share");
  struct Shape {
    int heads, n, n_q, kv_len;
  };
  for (const Shape s : {Shape{16, 1, 1024, 1024}, Shape{16, 8, 1024, 1024}, Shape{16, 64, 128, 128}, Shape{16, 1, 8192, 8192},
                        Shape{16, 1, 2048, 32768}, Shape{128, 1, 4096, 4096}}) {
    Bench b;
    constexpr MlaDims kHead{.nope = 128, .rope_dim = 64, .v_dim = 128, .kv_rank = 512};
    MlaDims d = kHead;
    d.n_heads = s.heads;
    const auto p = paged(b, kMla, s.n, s.n_q, s.kv_len, 1, true);
    const Linear kv_b = b.weights(Format::bf16, s.heads * 256, 512);
    const View q = b.array(DType::bf16, s.n * s.n_q, s.heads * 192), out = b.array(DType::bf16, s.n * s.n_q, s.heads * 128, 0.0f);
    const double expanded = b.time([&] { b.ops->attend_expanded({p->layers[0], &p->batch, p->batch.prefill, 0.07f}, d, q, kv_b, out); });
    const View latent = b.array(DType::bf16, s.kv_len, 576), kv = b.array(DType::bf16, s.kv_len, s.heads * 256);
    const double alone = b.time([&] {
      b.ops->attend_ragged({.dims = d, .scale = 0.07f, .q_position = s.kv_len - s.n_q}, q.rows(0, s.n_q), latent, kv, out.rows(0, s.n_q),
                           {});
    });
    const double pairs = s.n_q * (s.kv_len - 0.5 * (s.n_q - 1)), each = 2.0 * pairs * s.heads * (192 + 128),
                 all = s.n * (each + 2.0 * s.kv_len * s.heads * 256 * 512);
    std::printf("%6d %6d %7d %7d %12.1f %9.1f %6.1f%% %12.1f %9.1f %6.1f%%\n", s.heads, s.n, s.n_q, s.kv_len, expanded * 1e6,
                all / expanded * 1e-12, 100 * all / expanded / kMatrixLimit, alone * 1e6, each / alone * 1e-12,
                100 * each / alone / kMatrixLimit);
  }
}

void bench_prefill() {
  Bench b;
  std::printf("%-12s %-14s %5s %10s %9s %7s\n", "format", "out x in", "T", "us", "TFLOP/s", "share");
  struct Shape {
    int out, in;
  };
  for (const Format format : {Format::bf16, Format::q4_k, Format::q8_0, Format::int4_planar, Format::fp8_block})
    for (const Shape s : {Shape{3648, 2048}, Shape{2048, 2048}, Shape{4096, 4096}})
      for (const int rows : {128, 1024, 4096, 8192}) {
        const Linear w = b.weights(format, s.out, s.in, 4);
        const View x = b.array(DType::bf16, rows, s.in), y = b.array(DType::bf16, rows, s.out, 0.0f);
        const double t = b.time([&] {
          for (int i = 0; i < 4; ++i) b.ops->linear(x, w.matrix(i), y);
        }) / 4;
        const double flops = 2.0 * rows * s.out * s.in;
        std::printf("%-12s %6d x %-5d %5d %10.2f %9.1f %6.1f%%\n", std::string(info(format).name).c_str(), s.out, s.in, rows, t * 1e6,
                    flops / t * 1e-12, 100 * flops / t / kMatrixLimit);
      }
}

int run(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  std::vector<int> numbers;
  for (int i = what == "model" ? 4 : 2; i < argc; ++i) numbers.push_back(std::atoi(argv[i]));
  if (what == "linear")
    bench_linear();
  else if (what.rfind("moe", 0) == 0)
    bench_moe(numbers, what.substr(3));
  else if (what == "grouped")
    bench_grouped(numbers);
  else if (what == "mla")
    bench_mla();
  else if (what == "gqa")
    bench_gqa();
  else if (what == "prompts")
    bench_prompts();
  else if (what == "prefill")
    bench_prefill();
  else if (what == "ops")
    bench_ops(numbers);
  else if (what == "few")
    bench_few(numbers);
  else if (what == "model" && argc > 4)
    bench_model(argv[2], numbers, std::atoi(argv[3]));
  else {
    std::printf(
        "cuda_bench linear | moe[FORMAT] ROWS... | grouped ROWS... | ops ROWS... | few ROWS... | mla | gqa | prompts | prefill | model "
        "bf16|q4_k_m|int4 CONTEXT BATCH...\n");
    return 2;
  }
  return 0;
}

}  // namespace
}  // namespace cachalot::test

int main(int argc, char** argv) {
  try {
    return cachalot::test::run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
