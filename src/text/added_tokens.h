// Tokens found in the text before it is split: control tokens and user-defined ones. Leftmost first, of those the longest.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cachalot {

constexpr size_t kMaxAddedToken = 1024;  // bytes; bounds the work at each position of the text

struct AddedToken {
  int id = 0;
  bool control = false;
  bool single_word = false;  // only where no word character touches it
  bool strip_left = false;   // takes in the spaces before it
  bool strip_right = false;  // and behind it
};

class AddedTokens {
 public:
  // `content` has 1 to kMaxAddedToken bytes. A content added twice keeps the first token.
  void add(std::string_view content, AddedToken token);
  [[nodiscard]] bool empty() const { return tokens_.empty(); }

  struct Match {
    size_t begin, end;  // bytes of the text
    int id;
  };
  // The next match at or behind `from`. Control tokens count only when `control` is set; spaces stripped never reach before `from`.
  [[nodiscard]] std::optional<Match> find(std::string_view text, size_t from, bool control) const;

 private:
  struct Node {
    int token = -1;                                      // index into tokens_
    std::vector<std::pair<uint8_t, uint32_t>> children;  // sorted by byte
  };
  [[nodiscard]] const AddedToken* longest_at(std::string_view text, size_t at, bool control, size_t& length) const;

  std::vector<Node> nodes_ = std::vector<Node>(1);
  std::vector<AddedToken> tokens_;
  uint32_t roots_[256] = {};  // children of the root; 0 for none
};

}  // namespace cachalot
