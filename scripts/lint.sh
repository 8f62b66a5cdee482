#!/usr/bin/env bash
# Checks the C++ sources: scripts/lint.sh format | includes | tidy BUILD_DIR [all|changed|FILE...]
# `tidy changed` takes the files that differ from where this branch left origin/main, and those not yet committed.
set -euo pipefail
cd "$(dirname "$0")/.."

sources() { git ls-files --cached --others --exclude-standard -- "$@" | sort -u | while read -r f; do [[ -f $f ]] && echo "$f"; done; }

# A file that was clean with the same text, headers and rules need not be checked again: such checks leave a stamp.
export tidy_cache=${XDG_CACHE_HOME:-$HOME/.cache}/cachalot-tidy
tidy_one() {
  local build=$1 file=$2 key parts
  parts=$(g++ -std=c++20 -Iinclude -Isrc -MM "$file" 2>/dev/null | sed 's/^[^:]*://; s/\\$//') || parts=""
  key=$({ clang-tidy --version; cat .clang-tidy "$file" $parts; } 2>/dev/null | sha256sum | cut -d' ' -f1)
  [[ -n $parts && -f $tidy_cache/$key ]] && return 0
  # The filter drops the counts of warnings in system headers.
  clang-tidy -p "$build" --quiet "$file" 2> >(grep -vE 'warnings? (generated|treated)|^Suppressed|^Use -header-filter' >&2) || return 1
  mkdir -p "$tidy_cache" && touch "$tidy_cache/$key"
}
export -f tidy_one

case "${1:-}" in
  format)
    sources '*.h' '*.cpp' '*.cu' '*.cuh' | xargs -r -P "$(nproc)" -n 40 clang-format --dry-run -Werror
    ;;
  includes)
    bash cmake/check_includes.sh
    ;;
  tidy)
    build=$2 files=$(sources 'src/*.cpp')
    [[ ${3:-all} == all || $3 == changed ]] || files=$(printf '%s\n' "${@:3}")
    if [[ ${3:-all} == changed ]] && base=$(git merge-base HEAD origin/main 2>/dev/null); then
      changed=$({ git diff --name-only "$base"; git ls-files --others --exclude-standard; } | sort -u)
      files=$(comm -12 <(echo "$files" | sort) <(echo "$changed"))
    fi
    # Only what this build compiles: other files have no command to check them with.
    files=$(for f in $files; do grep -qF "/$f\"" "$build/compile_commands.json" && echo "$f"; done || true)
    [[ -n $files ]] || { echo "clang-tidy: nothing to check"; exit 0; }
    echo "$files" | xargs -P "$(nproc)" -I{} bash -c 'tidy_one "$1" "$2"' _ "$build" {}
    echo "clang-tidy: clean, $(wc -l <<<"$files") files"
    ;;
  *)
    echo "usage: $0 format | includes | tidy BUILD_DIR [all|changed|FILE...]" >&2
    exit 2
    ;;
esac
