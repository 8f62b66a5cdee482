// Finds tags in a stream of text, however the stream is cut, and holds back no more than what may become one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace cachalot::server {

class TagScanner {
 public:
  // What comes next in the stream: text that holds no tag, then perhaps a tag (its index in `tags`, else -1).
  struct Found {
    std::string text;
    int tag = -1;
  };
  void push(std::string_view piece) { held_ += piece; }
  void put_back(std::string_view piece) { held_.insert(0, piece); }  // comes again next
  // The earliest tag wins, of two at one place the longest. With tag == -1 all that can be told was told: push more.
  [[nodiscard]] Found next(const std::vector<std::string_view>& tags);
  // What is left at the end of the stream.
  [[nodiscard]] std::string rest();
  [[nodiscard]] std::string_view waiting() const { return held_; }  // pushed and not told yet

 private:
  std::string held_;
};

}  // namespace cachalot::server
