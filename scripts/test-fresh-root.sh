#!/usr/bin/env bash
# Proves that a fresh clone works on a bare Debian 12: makes one with debootstrap, clones this repository's HEAD into it and runs make there.
# Needs root and debootstrap. Usage: scripts/test-fresh-root.sh [TARGET...]   (default: demo test)
# ROOT_DIR (default: a new folder under TMPDIR, removed at the end) keeps the root for another run; SUITE and MIRROR as in debootstrap.
set -euo pipefail

repository=$(cd "$(dirname "$0")/.." && pwd)
targets=("${@:-demo}")
[[ $# -gt 0 ]] || targets=(demo test)
[[ $(id -u) -eq 0 ]] || { echo "test-fresh-root: needs root" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "test-fresh-root: needs debootstrap" >&2; exit 1; }

# Mounts are made in a namespace of their own, so that none stays behind.
[[ -n ${IN_MOUNT_NAMESPACE:-} ]] || exec env IN_MOUNT_NAMESPACE=1 unshare --mount "$0" "${targets[@]}"

keep=${ROOT_DIR:+yes}
root=${ROOT_DIR:-$(mktemp -d -t cachalot-root-XXXXXX)}
clean_up() {
  for place in proc dev/pts; do ! mountpoint -q "$root/$place" || umount "$root/$place"; done
  [[ -n $keep ]] || rm -rf --one-file-system "$root"
}
trap clean_up EXIT

suite=${SUITE:-bookworm}
if [[ ! -x $root/usr/bin/git ]]; then
  echo "== debootstrap"
  # Without a MIRROR of the caller's, the one that this machine's own apt uses.
  mirror=${MIRROR:-$(apt-get indextargets --format '$(CODENAME) $(REPO_URI)' 'Created-By: Packages' 2>/dev/null | sed -n "s/^$suite //p" | head -n 1)}
  debootstrap --variant=minbase --include=make,git,ca-certificates "$suite" "$root" ${mirror:+"$mirror"} >/dev/null
fi
# A machine of the same release lends the root its ways to packages.
if grep -qs "VERSION_CODENAME=$suite" /etc/os-release; then
  cp -L /etc/resolv.conf "$root/etc/resolv.conf"
  cp -r /etc/apt/sources.list.d/. "$root/etc/apt/sources.list.d/"
  grep -ls 'Acquire::' /etc/apt/apt.conf.d/* | xargs -r cp -t "$root/etc/apt/apt.conf.d/"
fi

mount -t proc proc "$root/proc"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -sfn pts/ptmx "$root/dev/ptmx"

echo "== clone"
rm -rf "$root/src"
git clone -q --no-hardlinks "$repository" "$root/src/cachalot"
for target in "${targets[@]}"; do
  echo "== make $target"
  chroot "$root" /usr/bin/env -i HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 TERM="${TERM:-dumb}" \
    ${http_proxy:+http_proxy="$http_proxy"} ${https_proxy:+https_proxy="$https_proxy"} make -C /src/cachalot --no-print-directory "$target"
done
