// Pace: what steps cost, learnt from those that ran, and how many prompt rows fit into a time.
#pragma once

namespace cachalot {

class Pace {
 public:
  void record(int n_decode_rows, int n_prompt_rows, double seconds);
  // Of a step that only decodes; 0: none ran yet.
  [[nodiscard]] double decode_seconds() const { return decode_seconds_; }
  // That a prompt row adds to a step; 0: none ran yet.
  [[nodiscard]] double row_seconds() const { return row_seconds_; }
  // Prompt rows beside decode rows in a step of that length; a cautious number while the cost of a row is not known.
  [[nodiscard]] int prompt_rows_within(double seconds) const;

 private:
  double decode_seconds_ = 0.0, row_seconds_ = 0.0;
};

}  // namespace cachalot
