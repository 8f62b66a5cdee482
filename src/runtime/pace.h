// Pace: what steps cost, learnt from those that ran, and how many prompt rows fit into a time.
#pragma once

namespace cachalot {

// A step that decodes takes decode_seconds(); prompt rows beside it, or alone, add a fixed part and one for each row. The fixed part is
// what many rows share: experts that only they touch, launches, work that decoding has recorded in a graph.
class Pace {
 public:
  void record(int n_decode_rows, int n_prompt_rows, double seconds);
  // Of a step that only decodes; 0: none ran yet.
  [[nodiscard]] double decode_seconds() const { return decode_seconds_; }
  // That one more prompt row adds to a step that has some; 0: none ran yet.
  [[nodiscard]] double row_seconds() const { return row_seconds_; }
  // That prompt rows add to a step however few they are.
  [[nodiscard]] double fixed_seconds() const { return fixed_seconds_; }
  // Prompt rows beside decode rows in a step of that length; a cautious number while the cost of a row is not known.
  [[nodiscard]] int prompt_rows_within(double seconds) const;
  // Time for a step without prompt rows, so that the cost of decoding is known and not long out of date.
  [[nodiscard]] bool wants_decode_step() const { return decode_seconds_ <= 0.0 || steps_since_decode_ >= kStale; }
  // Prompt rows of a step that takes twice as long as its rows need by themselves: fewer waste more than half of it. 0: not known yet.
  [[nodiscard]] int prompt_rows_at_half_speed() const;

 private:
  static constexpr int kStale = 128;  // steps

  // A line is believed up to twice the rows that were seen.
  [[nodiscard]] int trusted(double rows) const;

  double decode_seconds_ = 0.0, row_seconds_ = 0.0, fixed_seconds_ = 0.0;
  // Moving averages over steps with prompt rows: their number, their seconds, and the products that a regression needs.
  double rows_ = 0.0, due_ = 0.0, rows_rows_ = 0.0, rows_due_ = 0.0;
  double most_rows_ = 0.0;
  int steps_since_decode_ = 0;
};

}  // namespace cachalot
