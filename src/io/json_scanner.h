// JsonScanner: walks JSON text once and keeps nothing, for documents that may be large and hostile at once (safetensors headers
// of up to 100 MB, shard indexes): a tree of such text could take ten times its size.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace cachalot {

class JsonScanner {
 public:
  // A string as it stands between its quotes; checked, not yet unescaped.
  struct Text {
    std::string_view raw;
    bool escaped = false;
  };

  // `where` starts every error message. Throws Error when the text is not UTF-8.
  JsonScanner(std::string_view text, std::string where);

  [[nodiscard]] size_t position() const { return at_; }
  void seek(size_t position) { at_ = position; }

  char peek();  // next character that is no white space; '\0' at the end
  bool accept(char c);
  void expect(char c);
  Text string(std::string_view what);
  // A whole number from 0 to 2^63 - 1, written without fraction or exponent. `what` names it in messages.
  uint64_t whole_number(std::string_view what);
  // Any value, at most `max_depth` levels of arrays and objects.
  void skip_value(int max_depth);
  void skip_null();
  void expect_end();

  // Calls on_key(Text key) for every member; it must consume the value.
  template <typename F>
  void object(F&& on_key) {
    expect('{');
    if (accept('}')) return;
    do {
      const Text key = string("a key");
      expect(':');
      on_key(key);
    } while (accept(','));
    expect('}');
  }
  // Calls on_item() for every element; it must consume the value.
  template <typename F>
  void array(F&& on_item) {
    expect('[');
    if (accept(']')) return;
    do on_item();
    while (accept(','));
    expect(']');
  }

  // Throws Error naming the place and what stands there.
  [[noreturn]] void wrong(std::string_view expected);
  static std::string unescape(const Text& text);

 private:
  void skip_number();
  void skip_word(std::string_view word);

  std::string_view text_;
  std::string where_;
  size_t at_ = 0;
};

}  // namespace cachalot
