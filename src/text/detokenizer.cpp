// Utf8Stream and Detokenizer.
#include "text/detokenizer.h"

#include "text/unicode.h"

namespace cachalot {

std::string Utf8Stream::push(std::string_view bytes) {
  const std::string joined = held_.append(bytes);
  held_.clear();
  std::string out;
  out.reserve(joined.size());
  const char* const end = joined.data() + joined.size();
  for (const char* p = joined.data(); p < end;) {
    int size = 0;
    const unicode::Utf8State state = unicode::scan_utf8(p, end, size);
    if (state == unicode::Utf8State::kCut) {
      held_.assign(p, end);
      break;
    }
    out.append(state == unicode::Utf8State::kValid ? std::string_view(p, static_cast<size_t>(size)) : unicode::kReplacement);
    p += size;
  }
  return out;
}

std::string Utf8Stream::finish() {
  const bool cut = !held_.empty();
  held_.clear();
  return std::string(cut ? unicode::kReplacement : std::string_view());
}

std::string Detokenizer::push(int id) {
  if (skip_special_ && tokenizer_->is_special(id)) return {};
  return stream_.push(tokenizer_->piece(id));
}

}  // namespace cachalot
