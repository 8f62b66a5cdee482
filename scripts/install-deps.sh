#!/usr/bin/env bash
# Installs the Debian packages that a task needs, quietly, and only when one is missing: scripts/install-deps.sh build test lint fuzz
# Needs root or sudo only then. CACHALOT_SKIP_DEPS=1 leaves the system as it is.
set -euo pipefail

declare -A packages=(
  [build]="g++ cmake ninja-build pkg-config xz-utils ccache libfmt-dev libsimdjson-dev nlohmann-json3-dev libpcre2-dev libxxhash-dev libcli11-dev libbenchmark-dev libboost-dev libssl-dev libspdlog-dev"
  [test]="libgtest-dev libgmock-dev"
  [lint]="clang-format clang-tidy"
  [fuzz]="clang libclang-rt-14-dev"
)

[[ "${CACHALOT_SKIP_DEPS:-}" == 1 ]] && exit 0
wanted=()
for group in "$@"; do
  [[ -n "${packages[$group]:-}" ]] || { echo "install-deps: unknown group '$group', expected one of: ${!packages[*]}" >&2; exit 2; }
  read -ra names <<<"${packages[$group]}"
  wanted+=("${names[@]}")
done

if ! command -v dpkg-query >/dev/null; then
  echo "install-deps: not a Debian system; please see that the equivalents of these are installed: ${wanted[*]}" >&2
  exit 0
fi
missing=()
for name in "${wanted[@]}"; do
  [[ "$(dpkg-query -W -f='${db:Status-Status}' "$name" 2>/dev/null)" == installed ]] || missing+=("$name")
done
[[ ${#missing[@]} -eq 0 ]] && exit 0

as_root=()
if [[ $(id -u) -ne 0 ]]; then
  command -v sudo >/dev/null || { echo "install-deps: please install as root: apt-get install ${missing[*]}" >&2; exit 1; }
  as_root=(sudo)
fi
echo "Installing ${missing[*]}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
install() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null
}
# A list that cannot be refreshed need not matter: the installation tells.
if ! { "${as_root[@]}" apt-get update -qq || true; install; } >"$log" 2>&1; then
  tail -n 20 "$log" >&2
  echo "install-deps: could not install ${missing[*]}" >&2
  exit 1
fi
