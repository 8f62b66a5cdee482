#!/usr/bin/env bash
# The official openai and anthropic clients against `cachalot serve` on the trained tiny models: scripts/test-conformance.sh BUILD_DIR
# Needs python3 with venv, and PyPI for the clients (kept in BUILD_DIR/conformance). Exit 77: the clients cannot be had here.
set -euo pipefail
build=$(realpath "${1:-build/release}")
root=$(realpath "$(dirname "$0")/..")
venv=$build/conformance/venv

if ! "$venv/bin/python" -c 'import openai, anthropic, pytest' 2>/dev/null; then
  mkdir -p "$build/conformance"
  python3 -m venv "$venv" 2>/dev/null || { echo "conformance: skipped, python3 has no venv (package python3-venv)"; exit 77; }
  timeout 120 "$venv/bin/pip" install --quiet --disable-pip-version-check --retries 0 --timeout 5 -r "$root/tests/conformance/requirements.txt" ||
    { echo "conformance: skipped, the clients could not be installed from PyPI"; exit 77; }
fi

export CACHALOT_KEY=conformance-key
failed=0
for model in tiny-v3 tiny-v2; do
  log=$build/conformance/$model.log
  rm -f "$log"
  "$build/bin/cachalot" serve "$build/testdata/$model" --port 0 --alias "$model" --api-key "$CACHALOT_KEY" --max-model-len 2048 --log-file "$log" \
    --drain-delay 0 --quiet &
  server=$!
  trap 'kill -9 $server 2>/dev/null || true' EXIT
  for _ in $(seq 300); do
    grep -q '"event":"ready"' "$log" 2>/dev/null && break
    kill -0 $server 2>/dev/null || { echo "conformance: the server ended while loading $model"; exit 1; }
    sleep 0.1
  done
  CACHALOT_URL=$(sed -n 's/.*"event":"listening","address":"\([^"]*\)".*/\1/p' "$log" | head -n 1)
  export CACHALOT_URL CACHALOT_MODEL=$model
  echo "== $model at $CACHALOT_URL"
  # Settings of a user's own accounts must not reach the clients.
  env -u OPENAI_API_KEY -u ANTHROPIC_API_KEY "$venv/bin/python" -m pytest -q -p no:cacheprovider "$root/tests/conformance" || failed=1
  kill -TERM $server
  wait $server || { echo "conformance: the server did not end well"; failed=1; }
  trap - EXIT
done
exit $failed
