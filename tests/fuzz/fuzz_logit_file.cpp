// libFuzzer target for files of log-probabilities: any bytes are read or refused with an Error, and every row of what is read lies in them.
#include "base/error.h"
#include "eval/logit_file.h"
#include "fuzz/memory_path.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace cachalot;
  const MemoryPath file(data, size);
  try {
    const LogitFile logits(file.path());
    unsigned sum = 0;
    for (const int token : logits.tokens())
      if (token < 0 || token >= logits.vocab()) std::abort();
    for (int w = 0; w < logits.n_windows(); ++w)
      for (int i = 0; i < logits.rows_per_window(); ++i)
        for (const uint16_t code : logits.row(w, i).codes) sum += code;  // must lie in the input
    if (sum == 0x7fffffff) std::abort();                                 // keeps the reads
  } catch (const Error&) {
  }
  return 0;
}
