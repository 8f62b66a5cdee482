// Sinks for TraceOps.
#include "cli/op_watch.h"

#include <fmt/format.h>

#include <cstdio>
#include <string_view>

#include "base/error.h"
#include "cli/text_units.h"
#include "ops/trace_ops.h"

namespace cachalot {
namespace {

// Which layer a call belongs to. Every layer ends with the second add_rmsnorm that it makes (Decoder::forward).
class LayerCounter {
 public:
  int layer_of(const TraceRecord& record) {
    if (record.index == 0) n_norms_ = 0;
    const int layer = n_norms_ / 2;
    if (std::string_view(record.op) == "add_rmsnorm") ++n_norms_;
    return layer;
  }

 private:
  int n_norms_ = 0;
};

std::string shape_text(const View& view) {
  std::string text = "[";
  for (int i = 0; i < view.n_dims; ++i) text += (i > 0 ? ", " : "") + std::to_string(view.shape[static_cast<size_t>(i)]);
  return text + "]";
}

}  // namespace

std::unique_ptr<Ops> make_printing_ops(Ops& inner) {
  return make_trace_ops(inner, [counter = LayerCounter()](const TraceRecord& record) mutable {
    fmt::print(stderr, "{:5}  layer {:3}  {:16} {:18} {}\n", record.index, counter.layer_of(record), record.op, shape_text(record.out),
               seconds_text(record.seconds));
  });
}

std::unique_ptr<Ops> make_finite_ops(Ops& inner) {
  return make_trace_ops(inner, [&inner, counter = LayerCounter()](const TraceRecord& record) mutable {
    const int layer = counter.layer_of(record);
    if (!record.out) return;
    const int64_t n = count_not_finite(inner, record.out);
    if (n > 0)
      fail("layer {}: {} (call {} of the pass) gave {} values that are NaN or infinite among {}, expected none", layer, record.op,
           record.index, n, shape_text(record.out));
  });
}

}  // namespace cachalot
