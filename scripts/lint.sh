#!/usr/bin/env bash
# Checks the C++ sources: scripts/lint.sh format | includes | tidy BUILD_DIR [all|changed]
# `tidy changed` takes the files that differ from where this branch left origin/main, and those not yet committed.
set -euo pipefail
cd "$(dirname "$0")/.."

sources() { git ls-files --cached --others --exclude-standard -- "$@" | sort -u | while read -r f; do [[ -f $f ]] && echo "$f"; done; }

case "${1:-}" in
  format)
    sources '*.h' '*.cpp' '*.cu' '*.cuh' | xargs -r -P "$(nproc)" -n 40 clang-format --dry-run -Werror
    ;;
  includes)
    bash cmake/check_includes.sh
    ;;
  tidy)
    build=$2 files=$(sources 'src/*.cpp')
    if [[ ${3:-all} == changed ]] && base=$(git merge-base HEAD origin/main 2>/dev/null); then
      changed=$({ git diff --name-only "$base"; git ls-files --others --exclude-standard; } | sort -u)
      files=$(comm -12 <(echo "$files" | sort) <(echo "$changed"))
    fi
    # Only what this build compiles: other files have no command to check them with.
    files=$(for f in $files; do grep -qF "/$f\"" "$build/compile_commands.json" && echo "$f"; done || true)
    [[ -n $files ]] || { echo "clang-tidy: nothing to check"; exit 0; }
    echo "$files" | xargs -P "$(nproc)" -n 1 clang-tidy -p "$build" --quiet 2> >(grep -vE 'warnings? (generated|treated)|^Suppressed|^Use -header-filter' >&2)
    ;;
  *)
    echo "usage: $0 format | includes | tidy BUILD_DIR [all|changed]" >&2
    exit 2
    ;;
esac
