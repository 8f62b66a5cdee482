// TagScanner.
#include "server/tag_scanner.h"

#include <algorithm>

namespace cachalot::server {
namespace {

// Length of the longest proper prefix of `tag` that ends `text`.
size_t partial_match(std::string_view text, std::string_view tag) {
  for (size_t n = std::min(tag.size() - 1, text.size()); n > 0; --n)
    if (text.substr(text.size() - n) == tag.substr(0, n)) return n;
  return 0;
}

}  // namespace

TagScanner::Found TagScanner::next(const std::vector<std::string_view>& tags) {
  size_t at = std::string::npos;
  int best = -1;
  for (size_t i = 0; i < tags.size(); ++i) {
    const size_t found = held_.find(tags[i]);
    if (found == std::string::npos) continue;
    if (found < at || (found == at && tags[i].size() > tags[static_cast<size_t>(best)].size())) {
      at = found;
      best = static_cast<int>(i);
    }
  }
  Found out;
  if (best >= 0) {
    out.text = held_.substr(0, at);
    out.tag = best;
    held_.erase(0, at + tags[static_cast<size_t>(best)].size());
    return out;
  }
  size_t wait = 0;
  for (const std::string_view tag : tags) wait = std::max(wait, partial_match(held_, tag));
  out.text = held_.substr(0, held_.size() - wait);
  held_.erase(0, held_.size() - wait);
  return out;
}

std::string TagScanner::rest() {
  std::string out = std::move(held_);
  held_.clear();
  return out;
}

}  // namespace cachalot::server
