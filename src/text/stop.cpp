// StopMatcher: one Knuth-Morris-Pratt automaton for each stop string.
#include "text/stop.h"

#include <algorithm>

#include "base/error.h"

namespace cachalot {

StopMatcher::StopMatcher(std::vector<std::string> stops, bool include_stop) : include_stop_(include_stop) {
  for (std::string& text : stops) {
    if (text.empty()) fail("stop: found an empty string, expected text");
    Stop stop{.text = std::move(text)};
    stop.border.resize(stop.text.size());
    for (size_t i = 1, k = 0; i < stop.text.size(); ++i) {
      while (k > 0 && stop.text[i] != stop.text[k]) k = stop.border[k - 1];
      if (stop.text[i] == stop.text[k]) ++k;
      stop.border[i] = k;
    }
    stops_.push_back(std::move(stop));
  }
}

StopMatcher::Result StopMatcher::push(std::string_view piece) {
  Result result;
  if (stopped()) {
    result.stopped = true;
    return result;
  }
  for (const char c : piece) {
    held_ += c;
    for (size_t s = 0; s < stops_.size(); ++s) {
      Stop& stop = stops_[s];
      while (stop.matched > 0 && stop.text[stop.matched] != c) stop.matched = stop.border[stop.matched - 1];
      if (stop.text[stop.matched] == c) ++stop.matched;
      if (stop.matched == stop.text.size() && (stopped_ < 0 || stop.text.size() > matched().size())) stopped_ = static_cast<int>(s);
    }
    if (stopped()) {
      if (!include_stop_) held_.resize(held_.size() - matched().size());
      result = {std::move(held_), true};
      held_.clear();
      return result;
    }
  }
  size_t wait = 0;
  for (const Stop& stop : stops_) wait = std::max(wait, stop.matched);
  result.text = held_.substr(0, held_.size() - wait);
  held_.erase(0, held_.size() - wait);
  return result;
}

std::string StopMatcher::flush() {
  std::string out = std::move(held_);
  held_.clear();
  for (Stop& stop : stops_) stop.matched = 0;
  return out;
}

}  // namespace cachalot
