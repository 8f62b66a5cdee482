// Which commit of the sources this binary was built from.
#pragma once

#include <string>

namespace cachalot {

struct BuildCommit {
  std::string commit;  // short hash, "+" behind it when files differed; "unknown" outside a repository
  int number = 0;      // of commits up to it
};
BuildCommit build_commit();

}  // namespace cachalot
