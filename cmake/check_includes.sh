#!/usr/bin/env bash
# Include check: a folder of src/ may include only itself and the folders listed for it (docs/architecture.md says why).
set -euo pipefail
cd "$(dirname "$0")/.."

# The public headers of include/cachalot are open to every folder.
declare -A allowed=(
  [base]="" [tensor]="base" [io]="tensor base" [text]="base" [ops]="tensor base"
  [cpu]="ops tensor base" [cuda]="ops tensor base"
  [model]="io ops tensor base" [runtime]="model io ops tensor base"
  [grammar]="base"
  [convert]="io model text tensor base" [eval]="runtime model text io ops tensor base"
  [quant]="convert eval runtime model text io ops tensor base"
  [server]="text grammar base"
  [cli]="web base tensor io text grammar ops cpu cuda model runtime convert quant eval server"
)
errors=0
complain() { echo "$1: $2" >&2; errors=$((errors + 1)); }

while IFS=: read -r file line text; do
  folder=${file#src/}; folder=${folder%%/*}
  name=$(sed -E 's/^[[:space:]]*#[[:space:]]*include[[:space:]]*([<"][^>"]+[>"]).*/\1/' <<<"$text")
  target=${name:1:-1}
  if [[ -z ${allowed[$folder]+known} ]]; then
    complain "$file:$line" "folder src/$folder has no rule in cmake/check_includes.sh"
  elif [[ $file == src/cpu/isa/* && ! $target =~ ^(cpu/isa/.*|immintrin.h|cstdint|cstddef|stdint.h|stddef.h)$ ]]; then
    complain "$file:$line" "src/cpu/isa may include intrinsics, fixed-width types and its own headers only, found $name"
  elif [[ $folder != cuda && $target =~ ^(cuda|cublas|cudnn|nccl|nvrtc|cub/|thrust/|cutlass/|cute/) && ! $target =~ ^cuda/cuda_ops.h$ ]]; then
    complain "$file:$line" "CUDA headers belong to src/cuda, found $name"
  elif [[ $name == \"* && ${target%%/*} != "$folder" && ${target%%/*} != cachalot && " ${allowed[$folder]} " != *" ${target%%/*} "* ]]; then
    complain "$file:$line" "src/$folder must not include $name; it may include: $folder ${allowed[$folder]}"
  fi
done < <(grep -rnE '^[[:space:]]*#[[:space:]]*include' src --include='*.h' --include='*.cpp' --include='*.cu' --include='*.cuh' --include='*.inc')

# Concrete backends are named where they are made and in the one function of the command line that chooses.
while IFS=: read -r file line text; do
  complain "$file:$line" "only src/cli/backend.cpp names a concrete backend, found: $text"
done < <(grep -rnE 'make_(ref|cpu|cuda)_ops *\(' src --include='*.h' --include='*.cpp' --include='*.cu' |
  grep -vE '^src/(cpu|cuda|cli/backend\.cpp)|^src/ops/(ops\.h|ref_ops|[a-z]+_cases)')

[[ $errors -eq 0 ]] || { echo "include check: $errors fault(s)" >&2; exit 1; }
echo "include check: clean"
