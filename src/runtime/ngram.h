// NgramGuesser: guesses the next tokens of a text from what followed the same few tokens earlier in it (prompt lookup decoding).
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace cachalot {

class NgramGuesser {
 public:
  // At most `most` tokens that may follow; none when the last tokens never stood there before. `tokens` only grows from call to call.
  std::vector<int> guess(std::span<const int> tokens, int most);

 private:
  static constexpr int kLongest = 3, kShortest = 2;  // tokens that must be the same
  void learn(std::span<const int> tokens);

  std::unordered_map<uint64_t, int> behind_[kLongest + 1];  // by length: hash of the tokens to the place behind them, the latest
  int n_known_ = 0;                                         // places whose token has been learnt
};

}  // namespace cachalot
