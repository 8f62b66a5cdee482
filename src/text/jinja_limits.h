// TemplateLimits: what one chat template may cost. Templates come inside model files, so they are untrusted programs.
#pragma once

#include <cstddef>

namespace cachalot {

// Passing any of these is an Error that names the template, the line and the limit. The defaults let every published template render a
// conversation of several megabytes and stop a hostile one in well under a second and 100 MB.
struct TemplateLimits {
  size_t max_source_bytes = 512u << 10;  // of the template text
  int max_nesting = 200;                 // of brackets, operators and blocks in the source; and of lists within lists
  int max_eval_depth = 1000;             // expressions, blocks and macro calls being evaluated inside one another
  size_t max_steps = 10'000'000;  // one step is one expression or statement, one element visited, or 64 bytes of text copied or scanned
  size_t max_memory_bytes = 24u << 20;  // of the values alive at one moment, the caller's messages not counted
  size_t max_output_bytes = 16u << 20;  // of the rendered text, unfinished macro and block texts included
  double max_seconds = 1.0;             // wall clock, one render
};

}  // namespace cachalot
