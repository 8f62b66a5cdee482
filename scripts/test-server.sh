# For scripts that test a running server: source it. Functions end the script with exit 77 where something cannot be had here.
# shellcheck shell=bash

# python_with VENV IMPORTS REQUIREMENTS: a virtual environment that can import IMPORTS, from PyPI when it cannot yet.
python_with() {
  local venv=$1 imports=$2 requirements=$3
  "$venv/bin/python" -c "import $imports" 2>/dev/null && return
  mkdir -p "$(dirname "$venv")"
  python3 -m venv "$venv" 2>/dev/null || { echo "skipped: python3 has no venv (package python3-venv)"; exit 77; }
  timeout 300 "$venv/bin/pip" install --quiet --disable-pip-version-check --retries 0 --timeout 5 -r "$requirements" ||
    { echo "skipped: $imports could not be installed from PyPI"; exit 77; }
}

# start_server PROGRAM LOG ARGUMENTS...: serves at a free port; sets server_pid and CACHALOT_URL once it is ready.
start_server() {
  local program=$1 log=$2
  shift 2
  rm -f "$log"
  "$program" serve "$@" --port 0 --log-file "$log" --drain-delay 0 --quiet &
  server_pid=$!
  trap 'kill -9 $server_pid 2>/dev/null || true' EXIT
  for _ in $(seq 600); do
    grep -q '"event":"ready"' "$log" 2>/dev/null && break
    kill -0 "$server_pid" 2>/dev/null || { echo "the server ended while loading: $*"; exit 1; }
    sleep 0.1
  done
  CACHALOT_URL=$(sed -n 's/.*"event":"listening","address":"\([^"]*\)".*/\1/p' "$log" | head -n 1)
  export CACHALOT_URL
}

# stop_server: asks it to end; false when it does not end well.
stop_server() {
  kill -TERM "$server_pid"
  wait "$server_pid" || { echo "the server did not end well"; return 1; }
  trap - EXIT
}
