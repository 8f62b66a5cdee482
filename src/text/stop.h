// Stop strings in a stream of text: what may be shown at once, what must wait, and where the text ends.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace cachalot {

class StopMatcher {
 public:
  // Errors: Error for an empty stop string. `include_stop` leaves the stop string in the text.
  explicit StopMatcher(std::vector<std::string> stops, bool include_stop = false);

  struct Result {
    std::string text;      // safe to show
    bool stopped = false;  // a stop string is complete; all later text is dropped
  };
  // The first stop string to be complete ends the text where it begins; of several complete at once, the longest. Work is linear in
  // the text times the number of stop strings.
  [[nodiscard]] Result push(std::string_view piece);
  // The text held back when the stream ends otherwise.
  [[nodiscard]] std::string flush();

  [[nodiscard]] bool stopped() const { return stopped_ >= 0; }
  [[nodiscard]] const std::string& matched() const { return stops_[static_cast<size_t>(stopped_)].text; }  // only once stopped()

 private:
  struct Stop {
    std::string text;
    std::vector<size_t> border;  // border[i]: longest proper prefix of text that also ends text[0..i]
    size_t matched = 0;          // bytes of `text` that the stream ends with
  };
  std::vector<Stop> stops_;
  bool include_stop_;
  int stopped_ = -1;
  std::string held_;  // ends with the longest partial match
};

}  // namespace cachalot
