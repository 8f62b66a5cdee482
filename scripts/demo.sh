#!/usr/bin/env bash
# The demo: the trained tiny DeepSeek-V3 of testdata/ continues a contract and a piece of code. Usage: scripts/demo.sh BUILD_DIR
set -euo pipefail

build=$1
model=$build/testdata/tiny-v3

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
[[ -t 1 ]] || say() { printf '\n%s\n' "$*"; }
run() {
  say "$ cachalot run -m $model --raw --temp 0 --repeat-penalty 1.1 -n 80 --echo -p '$1'"
  "$build/bin/cachalot" run -m "$model" --raw --temp 0 --repeat-penalty 1.1 -n 80 --echo -p "$1"
}

say "$ cachalot inspect -m $model --no-tensors"
"$build/bin/cachalot" inspect -m "$model" --no-tensors
run 'This Agreement shall be governed by'
run $'def read_file(path):\n'
say "That model has 12.5 million parameters. A larger one: cachalot run -m model.gguf"
