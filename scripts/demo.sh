#!/usr/bin/env bash
# The demo: the trained tiny DeepSeek-V3 of testdata/ continues a sentence and a piece of code, greedily. Usage: scripts/demo.sh BUILD_DIR
set -euo pipefail

build=$1
model=$build/testdata/tiny-v3
prompt=$(sed -n 's/.*"greedy_prompt": *"\([^"]*\)".*/\1/p' "$model/reference.json")

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
[[ -t 1 ]] || say() { printf '\n%s\n' "$*"; }

say "$ cachalot inspect -m $model --no-tensors"
"$build/bin/cachalot" inspect -m "$model" --no-tensors
say "$ cachalot run -m $model --raw --temp 0 -n 60 --echo -p '$prompt'"
"$build/bin/cachalot" run -m "$model" --raw --temp 0 -n 60 --echo -p "$prompt"
say "$ cachalot run -m $model --raw --temp 0 --repeat-penalty 1.1 -n 80 --echo -p 'def read_file(path):'"
"$build/bin/cachalot" run -m "$model" --raw --temp 0 --repeat-penalty 1.1 -n 80 --echo -p $'def read_file(path):\n'
