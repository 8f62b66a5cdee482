// Alone in its file, so that a new commit compiles nothing else again.
#include "cli/build_commit.h"

#include "build_commit_text.h"

namespace cachalot {

BuildCommit build_commit() { return {CACHALOT_BUILD_COMMIT, CACHALOT_BUILD_NUMBER}; }

}  // namespace cachalot
