#!/usr/bin/env bash
# The page at "/" in a headless Chromium, on `cachalot serve` with the trained tiny model: scripts/test-page.sh BUILD_DIR
# Needs python3 with venv, PyPI for playwright (kept in BUILD_DIR/page), and Debian's chromium or CACHALOT_BROWSER. CACHALOT_SCREENSHOTS=FOLDER
# keeps pictures of both themes, wide and narrow. Exit 77: the browser or playwright cannot be had here.
set -euo pipefail
build=$(realpath "${1:-build/release}")
root=$(realpath "$(dirname "$0")/..")
venv=$build/page/venv
# shellcheck source=scripts/test-server.sh
source "$root/scripts/test-server.sh"

CACHALOT_BROWSER=${CACHALOT_BROWSER:-$(command -v chromium || command -v chromium-browser || true)}
[[ -n $CACHALOT_BROWSER ]] || { echo "skipped: there is no chromium"; exit 77; }
python_with "$venv" "playwright.sync_api, pytest" "$root/tests/page/requirements.txt"
[[ -z ${CACHALOT_SCREENSHOTS:-} ]] || mkdir -p "$CACHALOT_SCREENSHOTS"

export CACHALOT_BROWSER CACHALOT_KEY=page-key CACHALOT_MODEL=tiny-v3
start_server "$build/bin/cachalot" "$build/page/server.log" "$build/testdata/tiny-v3" --alias "$CACHALOT_MODEL" --api-key "$CACHALOT_KEY" --max-model-len 2048
failed=0
"$venv/bin/python" -m pytest -q -p no:cacheprovider "$root/tests/page" || failed=1
stop_server || failed=1
exit $failed
