#!/usr/bin/env bash
# Runs every libFuzzer target of a build for a while, JOBS at a time. Usage: scripts/fuzz.sh BUILD_DIR SECONDS JOBS [TARGET...]
# Seeds come from tests/fuzz/corpus/<target without fuzz_>; what the fuzzer finds stays in BUILD_DIR/corpus, and failing inputs in BUILD_DIR/artifacts.
set -euo pipefail

build=$1 seconds=$2 jobs=$3
shift 3
targets=("$@")
if [[ ${#targets[@]} -eq 0 ]]; then
  for program in "$build"/tests/fuzz/fuzz_*; do
    [[ -f $program && -x $program ]] && targets+=("$(basename "$program")")
  done
fi
[[ ${#targets[@]} -gt 0 ]] || { echo "fuzz: no targets in $build" >&2; exit 1; }

run_target() {
  local name=$1 program="$build/tests/fuzz/$1" corpus="$build/corpus/$1" log="$build/logs/$1.log" arguments
  mkdir -p "$corpus" "$build/artifacts" "$build/logs"
  arguments=(-max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 -print_final_stats=1 -artifact_prefix="$build/artifacts/$name-")
  [[ -f tests/fuzz/$name.dict ]] && arguments+=(-dict="tests/fuzz/$name.dict")
  arguments+=("$corpus")
  [[ -d tests/fuzz/corpus/${name#fuzz_} ]] && arguments+=("tests/fuzz/corpus/${name#fuzz_}")
  if "$program" "${arguments[@]}" >"$log" 2>&1; then
    echo "$name: ok, $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") inputs"
  else
    echo "$name: FAILED"
    tail -n 40 "$log"
    return 1
  fi
}
export -f run_target
export build seconds
printf '%s\n' "${targets[@]}" | xargs -P "$jobs" -I{} bash -c 'run_target {}'
