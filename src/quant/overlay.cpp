// Overlay: replacements first, then the base.
#include "quant/overlay.h"

#include "base/check.h"

namespace cachalot {

void Overlay::drop(std::string_view prefix) {
  std::erase_if(matrices_, [&](const auto& entry) { return entry.first.starts_with(prefix); });
  std::erase_if(vectors_, [&](const auto& entry) { return entry.first.starts_with(prefix); });
}

bool Overlay::has(std::string_view canonical) const {
  if (matrices_.contains(canonical) || vectors_.contains(canonical)) return true;
  return !hidden_.contains(canonical) && base_.has(canonical);
}

LinearSource Overlay::linear(std::string_view canonical, int n_matrices, int out, int in) const {
  const auto found = matrices_.find(canonical);
  if (found == matrices_.end()) return base_.linear(canonical, n_matrices, out, in);
  const LinearSource& source = found->second;
  CACHALOT_CHECK(source.n_matrices() == n_matrices && source.out == out && source.in == in, "{}: {} of [{}, {}], expected {} of [{}, {}]",
                 canonical, source.n_matrices(), source.out, source.in, n_matrices, out, in);
  return source;
}

std::vector<float> Overlay::vector(std::string_view canonical, int n) const {
  const auto found = vectors_.find(canonical);
  if (found == vectors_.end()) return base_.vector(canonical, n);
  CACHALOT_CHECK(found->second.size() == static_cast<size_t>(n), "{}: {} values, expected {}", canonical, found->second.size(), n);
  return found->second;
}

}  // namespace cachalot
