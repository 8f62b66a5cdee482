// Cases of the cache and of attention: GQA and MLA, all page sizes and cache formats, ragged batches with padding, long contexts in chunks.
#include <algorithm>
#include <cmath>

#include "ops/case_support.h"
#include "ops/paged_batch.h"

namespace cachalot::test {
namespace {

std::string attention_name(const char* op, const AttentionCase& s) {
  return fmt::format("{}/{}/{}x{}of{}x{}/{}/block{}", op, s.label, s.heads, s.layout.k_dim, s.layout.heads, s.layout.v_dim,
                     name_of(s.layout.format), s.layout.block_tokens);
}
int attended(const AttentionCase& s) { return s.count >= 0 ? s.count : static_cast<int>(s.sequences.size()) - s.first; }

// Query-context pairs and context rows of the attended sequences.
struct Work {
  double pairs = 0.0, context = 0.0, rows = 0.0;
};
Work work_of(const AttentionCase& s) {
  Work w;
  for (int i = s.first; i < s.first + attended(s); ++i) {
    const SequenceShape& seq = s.sequences[static_cast<size_t>(i)];
    if (seq.kv_len == 0) continue;
    w.pairs += seq.n_q * (seq.kv_len - (seq.n_q - 1) / 2.0);
    w.context += seq.kv_len;
    w.rows += seq.n_q;
  }
  return w;
}

constexpr MlaDims kTinyMla{.n_heads = 2, .nope = 8, .rope_dim = 4, .v_dim = 6, .kv_rank = 16};
constexpr MlaDims kGoldenMla{.n_heads = 4, .nope = 32, .rope_dim = 16, .v_dim = 32, .kv_rank = 64};
constexpr MlaDims kDeepSeekMla{.n_heads = 2, .nope = 128, .rope_dim = 64, .v_dim = 128, .kv_rank = 512};
constexpr MlaDims kThinMla{.n_heads = 2, .nope = 128, .rope_dim = 64, .v_dim = 128, .kv_rank = 16};  // DeepSeek's heads, cheap to expand

KvLayout mla_layout(int rank, int rope_dim, KvFormat format, int block_tokens) {
  return {.heads = 1, .k_dim = rank + rope_dim, .v_dim = rank, .v_is_k_prefix = true, .format = format, .block_tokens = block_tokens};
}
KvLayout gqa_layout(int heads, int k_dim, int v_dim, KvFormat format, int block_tokens) {
  return {.heads = heads, .k_dim = k_dim, .v_dim = v_dim, .format = format, .block_tokens = block_tokens};
}

OpCase kv_write_case(const KvLayout& layout, std::span<const SequenceShape> shapes) {
  OpCase c{.name = fmt::format("kv_write/{}x{}x{}/{}/block{}", layout.heads, layout.k_dim, layout.v_dim, name_of(layout.format),
                               layout.block_tokens),
           .op = "kv_write"};
  const std::vector<SequenceShape> sequences(shapes.begin(), shapes.end());
  for (const SequenceShape& s : sequences) c.bytes += s.n_q * 2.0 * static_cast<double>(layout.token_bytes());
  c.prepare = [=, name = c.name](Ops& ops, DType rounding) {
    CaseBuilder b(ops, rounding, name);
    const auto paged = make_paged_batch(b, layout, sequences);
    const auto k = b.activations(paged->batch.n_tokens, layout.heads * layout.k_dim, 1.0f, 8);
    const auto v = layout.v_is_k_prefix ? nullptr : b.activations(paged->batch.n_tokens, layout.heads * layout.v_dim);
    b.output("k", paged->k, true);
    if (v) b.output("v", paged->v, true);
    return b.finish([&ops, p = paged.get(), k, v] { ops.kv_write(p->kv, p->batch, k->view(), v ? v->view() : View{}); });
  };
  return c;
}

OpCase kv_gather_case(const KvLayout& layout, bool f32_out) {
  OpCase c{
      .name = fmt::format("kv_gather/{}/{}/block{}{}", layout.k_dim, name_of(layout.format), layout.block_tokens, f32_out ? "/f32" : ""),
      .op = "kv_gather"};
  c.prepare = [=, name = c.name](Ops& ops, DType rounding) {
    CaseBuilder b(ops, rounding, name);
    const SequenceShape sequences[] = {{1, 9}, {3, 150}, {1, 5}};
    const auto paged = make_paged_batch(b, layout, sequences);
    const auto out = b.unset(f32_out ? DType::f32 : ops.activation(), 101, layout.heads * layout.k_dim);
    b.output("out", out);
    return b.finish(
        [&ops, p = paged.get(), out] { ops.kv_gather({.kv = p->kv, .batch = &p->batch, .rows = p->rows(0, 3)}, 1, 33, 101, out->view()); });
  };
  return c;
}

MlaPrologue prologue_of(const MlaDims& d, const PagedBatch& p, View q, View row, View norm, View table) {
  return {.kv = p.kv, .batch = &p.batch, .dims = d, .q = q, .row = row, .norm = norm, .eps = 1e-6f, .rope = {d.rope_dim, true, table}};
}

// mla_prologue, and what kv_gather then reads.
OpCase mla_prologue_case(const MlaDims& d, KvFormat format) {
  OpCase c{.name = fmt::format("kv_write/mla_prologue/{}x{}+{}/{}/block16", d.n_heads, d.kv_rank, d.rope_dim, name_of(format)),
           .op = "kv_write"};
  if (format == KvFormat::fp8) c.slack = 6.0;  // a norm that differs in its last bit moves a code by one step of an eighth
  c.prepare = [=, name = c.name](Ops& ops, DType rounding) {
    CaseBuilder b(ops, rounding, name);
    const SequenceShape sequences[] = {{1, 9}, {20, 70}, {1, 0}};
    const auto paged = make_paged_batch(b, mla_layout(d.kv_rank, d.rope_dim, format, 16), sequences);
    const int rows = paged->batch.n_tokens;
    const auto q = b.activations(rows, d.n_heads * (d.nope + d.rope_dim), 1.0f, 8), row = b.activations(rows, d.kv_rank + d.rope_dim);
    const auto norm = b.f32(1, d.kv_rank), table = b.f32(80, d.rope_dim), out = b.unset(DType::f32, 20, d.kv_rank + d.rope_dim);
    b.output("q", q);
    b.output("row", row);
    b.output("out", out);
    return b.finish([&ops, d, p = paged.get(), q, row, norm, table, out] {
      ops.mla_prologue(prologue_of(d, *p, q->view(), row->view(), norm->view(), table->view()));
      ops.kv_gather({.kv = p->kv, .batch = &p->batch, .rows = p->rows(0, 3)}, 1, 50, 20, out->view());
    });
  };
  return c;
}

// gqa_prologue, and the keys and values that a row of ones then attends to.
OpCase gqa_prologue_case(int heads, const KvLayout& layout, int rope_dim, bool interleaved, bool norms) {
  OpCase c{.name = fmt::format("kv_write/gqa_prologue/{}of{}x{}rope{}{}{}/{}", heads, layout.heads, layout.k_dim, rope_dim,
                               interleaved ? "interleaved" : "", norms ? "norms" : "", name_of(layout.format)),
           .op = "kv_write",
           .bf16_cache = layout.format == KvFormat::bf16};
  c.slack = layout.format == KvFormat::bf16 ? 6.0 : 3.0;  // a norm and a rotation on the way, each of which may be rounded
  c.prepare = [=, name = c.name](Ops& ops, DType rounding) {
    CaseBuilder b(ops, rounding, name);
    const SequenceShape sequences[] = {{1, 9}, {20, 70}, {1, 0}};
    const auto paged = make_paged_batch(b, layout, sequences);
    const int rows = paged->batch.n_tokens, dim = layout.k_dim, width = heads * dim, kv_width = layout.heads * dim;
    const auto qkv = b.activations(rows, width + 2 * kv_width, 1.0f, 8), norm = b.f32(2, dim), table = b.f32(80, rope_dim);
    const auto out = b.unset(ops.activation(), rows, width);
    b.output("out", out);
    return b.finish([&ops, p = paged.get(), qkv, norm, table, out, norms, rope_dim, interleaved, width, kv_width, dim] {
      const View all = qkv->view(), q = all.cols(0, width), w = norm->view();
      GqaPrologue prologue{.kv = p->kv,
                           .batch = &p->batch,
                           .q = q,
                           .k = all.cols(width, kv_width),
                           .v = all.cols(width + kv_width, kv_width),
                           .eps = 1e-6f,
                           .rope = {rope_dim, interleaved, table->view()}};
      if (norms) prologue.q_norm = w.rows(0, 1), prologue.k_norm = w.rows(1, 1);
      ops.gqa_prologue(prologue);
      ops.attend({.kv = p->kv, .batch = &p->batch, .rows = p->rows(0, 3), .scale = 1.0f / static_cast<float>(dim)}, q, out->view());
    });
  };
  return c;
}

// The absorbed form whole, and the last rows that it put into the cache.
OpCase mla_absorbed_case(const MlaDims& d, KvFormat format, const std::string& label, std::vector<SequenceShape> sequences) {
  const bool rounded = format == KvFormat::bf16 || format == KvFormat::fp8;
  OpCase c{.name = fmt::format("attend/mla_absorbed/{}/{}x{}+{}/{}/block16", label, d.n_heads, d.kv_rank, d.rope_dim, name_of(format)),
           .op = "attend",
           .bf16_cache = rounded};
  c.slack = rounded ? 6.0 : 3.0;  // three results on the way are rounded; the new rows' numbers may fall to either side of a rounding
  c.prepare = [=, name = c.name](Ops& ops, DType rounding) {
    CaseBuilder b(ops, rounding, name);
    const auto paged = make_paged_batch(b, mla_layout(d.kv_rank, d.rope_dim, format, 16), sequences);
    const int rows = paged->batch.n_tokens, most = paged->batch.max_kv;
    const auto q = b.activations(rows, d.n_heads * (d.nope + d.rope_dim), 1.0f, 8), row = b.activations(rows, d.kv_rank + d.rope_dim);
    const auto norm = b.f32(1, d.kv_rank), table = b.f32(most, d.rope_dim), context = b.unset(ops.activation(), rows, d.n_heads * d.v_dim);
    const auto weights = std::make_shared<std::pair<Linear, Linear>>(
        b.weights({.format = Format::bf16, .out = d.kv_rank, .in = d.nope, .n_matrices = d.n_heads}),
        b.weights({.format = Format::bf16, .out = d.v_dim, .in = d.kv_rank, .n_matrices = d.n_heads}));
    const auto out = b.unset(DType::f32, 1, d.kv_rank + d.rope_dim);
    b.output("context", context);
    b.output("out", out);
    b.keep(weights);
    return b.finish([&ops, d, p = paged.get(), w = weights.get(), q, row, norm, table, context, out, last = sequences[0].kv_len - 1] {
      const Rows all = p->rows(0, static_cast<int>(p->kv_len.size()));
      ops.mla_absorbed({.prologue = prologue_of(d, *p, q->view(), row->view(), norm->view(), table->view()),
                        .rows = all,
                        .scale = 0.07f,
                        .uk = &w->first,
                        .uv = &w->second},
                       context->view());
      ops.kv_gather({.kv = p->kv, .batch = &p->batch, .rows = all}, 0, last, 1, out->view());
    });
  };
  return c;
}

// Rows of bytes: MLA only.
void add_fp8_cases(std::vector<OpCase>& cases) {
  constexpr KvFormat f = KvFormat::fp8;
  const std::vector<SequenceShape> mixed{{1, 30}, {1, 0}, {2, 2}, {3, 70}, {5, 129}, {16, 16}, {33, 100}}, few{{1, 65}, {3, 40}, {1, 0}};
  for (const int block : {8, 16, 32, 64}) {
    cases.push_back(kv_write_case(mla_layout(64, 16, f, block), mixed));
    cases.push_back(kv_gather_case(mla_layout(64, 16, f, block), block >= 32));
    cases.push_back(attend_case({"mixed", 3, mla_layout(24, 12, f, block), mixed}));
  }
  cases.push_back(kv_write_case(mla_layout(512, 64, f, 16), mixed));
  cases.push_back(kv_write_case(mla_layout(200, 32, f, 16), mixed));  // the last group has 72 numbers
  cases.push_back(attend_case({"mla", 16, mla_layout(512, 64, f, 64), few}));
  cases.push_back(attend_case({"mla", 128, mla_layout(512, 64, f, 16), few}));
  cases.push_back(attend_case({"mla_long", 16, mla_layout(512, 64, f, 64), {{1, 1500}, {1, 3}}}));
  cases.push_back(attend_case({"huge_scores", 16, mla_layout(512, 64, f, 16), few, 0, -1, 1e5f}));
  cases.push_back(attend_expanded_case({"part", 4, mla_layout(64, 16, f, 16), mixed, 2, 5}, kGoldenMla, Format::bf16));
  cases.push_back(
      attend_expanded_case({"deepseek", 2, mla_layout(512, 64, f, 16), {{1, 9}, {33, 50}, {1, 0}}}, kDeepSeekMla, Format::bf16));
}

}  // namespace

OpCase attend_case(const AttentionCase& s) {
  OpCase c{.name = attention_name("attend", s),
           .op = "attend",
           .bf16_cache = s.layout.format == KvFormat::bf16 || s.layout.format == KvFormat::fp8};
  const Work work = work_of(s);
  c.bytes = work.context * static_cast<double>(s.layout.token_bytes()) + work.rows * s.heads * (s.layout.k_dim + s.layout.v_dim) * 4.0;
  c.flops = 2.0 * work.pairs * s.heads * (s.layout.k_dim + s.layout.v_dim);
  if (s.query_scale > 10.0f) c.slack = 1000.0;  // scores of 1e5 have an absolute error of 1e-2 in f32, which is the weights' relative error
  c.prepare = [=, name = c.name](Ops& ops, DType rounding) {
    CaseBuilder b(ops, rounding, name);
    const auto paged = make_paged_batch(b, s.layout, s.sequences);
    const Rows rows = paged->rows(s.first, attended(s));
    const auto q = b.activations(rows.n_rows, s.heads * s.layout.k_dim, s.query_scale),
               out = b.unset(ops.activation(), rows.n_rows, s.heads * s.layout.v_dim);
    b.output("out", out);
    const Attn attn{.kv = paged->kv, .batch = &paged->batch, .rows = rows, .scale = 1.0f / std::sqrt(static_cast<float>(s.layout.k_dim))};
    return b.finish([&ops, attn, q, out] { ops.attend(attn, q->view(), out->view()); });
  };
  return c;
}

OpCase attend_expanded_case(const AttentionCase& s, const MlaDims& dims, Format kv_b) {
  OpCase c{.name = attention_name("attend_expanded", s) + "/" + format_name(kv_b),
           .op = "attend_expanded",
           .quantised = !is_float(kv_b),
           .bf16_cache = s.layout.format == KvFormat::bf16 || s.layout.format == KvFormat::fp8};
  const Work work = work_of(s);
  const WeightShape shape{.format = kv_b, .out = dims.n_heads * (dims.nope + dims.v_dim), .in = dims.kv_rank};
  c.bytes = weight_bytes(shape) + work.context * static_cast<double>(s.layout.token_bytes());
  c.flops = 2.0 * work.context * shape.out * shape.in + 2.0 * work.pairs * dims.n_heads * (dims.nope + dims.rope_dim + dims.v_dim);
  c.prepare = [=, name = c.name](Ops& ops, DType rounding) {
    CaseBuilder b(ops, rounding, name);
    const auto paged = make_paged_batch(b, s.layout, s.sequences);
    const Rows rows = paged->rows(s.first, attended(s));
    const Linear w = b.weights(shape);
    const auto q = b.activations(rows.n_rows, dims.n_heads * (dims.nope + dims.rope_dim), s.query_scale, 32);
    const auto out = b.unset(ops.activation(), rows.n_rows, dims.n_heads * dims.v_dim);
    b.output("out", out);
    const Attn attn{
        .kv = paged->kv, .batch = &paged->batch, .rows = rows, .scale = 1.0f / std::sqrt(static_cast<float>(dims.nope + dims.rope_dim))};
    return b.finish([&ops, attn, dims, q, w, out] { ops.attend_expanded(attn, dims, q->view(), w, out->view()); });
  };
  return c;
}

void add_attention_cases(std::vector<OpCase>& cases) {
  const std::vector<SequenceShape> one{{1, 1}}, decode{{1, 1}, {1, 7}, {1, 8}, {1, 9}, {1, 64}, {1, 65}, {1, 200}, {1, 0}, {1, 0}};
  const std::vector<SequenceShape> mixed{{1, 30}, {1, 0}, {2, 2}, {3, 70}, {5, 129}, {16, 16}, {33, 100}, {70, 70}};
  const std::vector<SequenceShape> long_context{{1, 1500}, {1, 3}};
  const std::vector<SequenceShape> whole_prompt{{130, 130}, {17, 150}};
  const KvFormat formats[] = {KvFormat::f32, KvFormat::f16, KvFormat::bf16};
  const int blocks[] = {8, 16, 32, 64};
  for (const KvFormat f : formats)
    for (const int block : blocks) {
      cases.push_back(kv_write_case(gqa_layout(2, 24, 18, f, block), mixed));
      cases.push_back(kv_write_case(mla_layout(64, 16, f, block), mixed));
      cases.push_back(kv_gather_case(mla_layout(64, 16, f, block), block >= 32));
      cases.push_back(attend_case({"decode", 4, gqa_layout(2, 64, 64, f, block), decode}));
      cases.push_back(attend_case({"mixed", 9, gqa_layout(3, 64, 64, f, block), mixed}));
      cases.push_back(attend_case({"decode", 4, mla_layout(64, 16, f, block), decode}));
      cases.push_back(attend_case({"mixed", 3, mla_layout(24, 12, f, block), mixed}));
      cases.push_back(attend_expanded_case({"mixed", 2, mla_layout(16, 4, f, block), mixed}, kTinyMla, Format::f32));
    }
  for (const KvFormat f : formats) {
    const std::vector<SequenceShape> few{{1, 65}, {3, 40}, {1, 0}};
    cases.push_back(attend_case({"one", 4, gqa_layout(4, 128, 128, f, 16), one}));
    cases.push_back(attend_case({"part", 8, gqa_layout(2, 128, 128, f, 16), mixed, 2, 4}));
    cases.push_back(attend_case({"prompt", 8, gqa_layout(1, 128, 128, f, 32), whole_prompt}));
    cases.push_back(attend_case({"uneven", 6, gqa_layout(3, 48, 40, f, 16), mixed}));
    cases.push_back(attend_case({"odd", 5, gqa_layout(5, 18, 7, f, 8), mixed}));
    cases.push_back(attend_case({"long", 4, gqa_layout(2, 64, 64, f, 16), long_context}));
    cases.push_back(attend_case({"mla", 16, mla_layout(512, 64, f, 64), few}));
    cases.push_back(attend_case({"mla", 128, mla_layout(512, 64, f, 16), few}));
    cases.push_back(attend_case({"mla_long", 16, mla_layout(512, 64, f, 64), long_context}));
    cases.push_back(attend_case({"huge_scores", 4, gqa_layout(2, 64, 64, f, 16), decode, 0, -1, 1e5f}));
    cases.push_back(attend_expanded_case({"part", 4, mla_layout(64, 16, f, 16), mixed, 2, 5}, kGoldenMla, Format::bf16));
    cases.push_back(attend_expanded_case({"long", 2, mla_layout(16, 4, f, 64), {{1, 0}, {40, 1100}, {600, 600}}}, kTinyMla, Format::f32));
    cases.push_back(
        attend_expanded_case({"deepseek", 2, mla_layout(512, 64, f, 16), {{1, 9}, {33, 50}, {1, 0}}}, kDeepSeekMla, Format::bf16));
  }
  // Prompts of several sequences at once, more of them than fit one launch, and a context that is taken in parts.
  std::vector<SequenceShape> prompts{{300, 300}, {129, 129}, {1, 1}, {64, 200}, {128, 256}, {127, 127}, {2, 500}, {1, 0}};
  for (int i = 0; i < 12; ++i) prompts.push_back({1 + i * 7 % 40, 1 + i * 7 % 40 + i * 31 % 60});
  for (const KvFormat f : {KvFormat::f32, KvFormat::bf16}) {
    cases.push_back(attend_expanded_case({"prompts", 2, mla_layout(16, 64, f, 16), prompts}, kThinMla, Format::bf16));
    cases.push_back(
        attend_expanded_case({"parts", 2, mla_layout(16, 64, f, 64), {{90, 90}, {40, 8300}, {60, 60}}}, kThinMla, Format::bf16));
    cases.push_back(attend_case({"prompts", 8, gqa_layout(2, 128, 128, f, 16), {{130, 130}, {17, 150}, {3, 9}, {300, 300}, {16, 16}}}));
  }
  for (const Format w : {Format::f16, Format::q8_0, Format::fp8_block, Format::q4_k})
    cases.push_back(attend_expanded_case({"deepseek", 2, mla_layout(512, 64, KvFormat::bf16, 32), {{20, 41}, {3, 3}}}, kDeepSeekMla, w));
  add_fp8_cases(cases);
  for (const KvFormat f : {KvFormat::f32, KvFormat::f16, KvFormat::bf16, KvFormat::fp8})
    for (const MlaDims& d : {kGoldenMla, kDeepSeekMla}) {
      cases.push_back(mla_prologue_case(d, f));
      cases.push_back(mla_absorbed_case(d, f, "one", {{1, 700}}));
      cases.push_back(mla_absorbed_case(d, f, "few", {{1, 130}, {1, 0}, {2, 300}}));
      cases.push_back(mla_absorbed_case(d, f, "short", {{1, 20}, {1, 1}}));
      cases.push_back(mla_absorbed_case(d, f, "more", {{1, 70}, {1, 33}, {3, 40}, {1, 90}}));
    }
  for (const KvFormat f : {KvFormat::f32, KvFormat::f16, KvFormat::bf16})
    for (const bool norms : {false, true}) {
      cases.push_back(gqa_prologue_case(6, gqa_layout(2, 64, 64, f, 16), 64, false, norms));
      cases.push_back(gqa_prologue_case(5, gqa_layout(5, 24, 24, f, 8), 24, true, norms));
      cases.push_back(gqa_prologue_case(4, gqa_layout(1, 128, 128, f, 64), 32, false, norms));
    }
  // One row, whose context is read in parts.
  MlaDims eight = kDeepSeekMla;
  eight.n_heads = 8;
  for (const int keys : {1, 17, 300, 1024, 1025, 1700})
    cases.push_back(mla_absorbed_case(eight, KvFormat::bf16, fmt::format("row of {} keys", keys), {{1, keys}}));
  // Sixteen heads, which devices take together, and contexts that make parts of several lengths.
  MlaDims sixteen = kDeepSeekMla;
  sixteen.n_heads = 16;
  for (const KvFormat f : {KvFormat::bf16, KvFormat::fp8}) {
    cases.push_back(mla_absorbed_case(sixteen, f, "one", {{1, 1700}}));
    cases.push_back(mla_absorbed_case(sixteen, f, "few", {{1, 250}, {2, 90}, {1, 0}}));
    std::vector<SequenceShape> sequences;
    for (int i = 0; i < 8; ++i) sequences.push_back({1, i % 3 == 0 ? 1120 : 100 + 37 * i});
    cases.push_back(mla_absorbed_case(sixteen, f, "rows8", sequences));
  }
  for (const KvFormat f : {KvFormat::bf16, KvFormat::fp8})
    for (const int rows : {8, 12, 19, 32}) {
      std::vector<SequenceShape> sequences;
      for (int i = 0; i < rows; ++i) sequences.push_back({1, i % 7 == 6 ? 0 : 40 + i * 97 % 300});  // every seventh is padding
      cases.push_back(mla_absorbed_case(kDeepSeekMla, f, fmt::format("rows{}", rows), sequences));
    }
}

}  // namespace cachalot::test
