#!/usr/bin/env bash
# Runs one command on a small virtual machine whose memory really is several NUMA nodes.
#
#   tools/numa_vm.sh [-n NODES] [-m MIB_PER_NODE] [-t SECONDS] -- COMMAND [ARG ...]
#   tools/numa_vm.sh --prepare        only installs what is needed; exit status 3 if it cannot
#
# The guest has one CPU and MIB_PER_NODE of memory per node. It sees the host's file system
# read-only, so the same Python and the same checkout, and starts in the caller's folder; it can
# write to /run (its TMPDIR and HOME) and /dev/shm. The command's output goes to stdout, its exit
# status is returned. The CPU is emulated: it boots in about 10 s, and Python runs 20 to 50 times
# slower than outside, so what runs inside should not import torch.
#
# The first run needs root and apt: it installs qemu and fetches a Debian kernel, about 100 MB.
set -euo pipefail

usage() { sed -n '4,5s/^# *//p' "$0" >&2; exit 2; }

nodes=2 mib=1024 limit=300 prepare_only=
[[ ${1:-} == --prepare ]] && { prepare_only=1; shift; set -- -- true; }
while getopts "n:m:t:" option; do
  case $option in n) nodes=$OPTARG ;; m) mib=$OPTARG ;; t) limit=$OPTARG ;; *) usage ;; esac
done
shift $((OPTIND - 1))
[[ ${1:-} == -- ]] && shift
[[ $# -gt 0 ]] || usage

cache=${XDG_CACHE_HOME:-$HOME/.cache}/shared-offload-numa-vm
# In the order of their dependencies: a virtio disk is not needed, 9p carries the file system.
modules=(virtio_ring virtio virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci
  netfs fscache 9pnet 9pnet_virtio 9p)

write_init() {  # the guest's first process
  cat >"$1" <<INIT
#!/bin/busybox sh
b=/bin/busybox
\$b mount -t proc p /proc; \$b mount -t sysfs s /sys
for m in ${modules[*]}; do \$b insmod /mods/\$m.ko; done
\$b mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=1048576 hostroot /new
\$b mount -t proc p /new/proc; \$b mount -t sysfs s /new/sys
for d in dev run; do \$b mount -t tmpfs t /new/\$d; done
\$b mkdir -p /new/dev/shm; \$b mount -t tmpfs t /new/dev/shm
for n in "null 1 3" "zero 1 5" "urandom 1 9" "random 1 8" "tty 5 0"; do
  set -- \$n; \$b mknod -m 666 /new/dev/\$1 c \$2 \$3
done
\$b cp /cmd /new/run/cmd
echo "@@begin@@"; \$b chroot /new /bin/bash /run/cmd; echo "@@exit \$?@@"
\$b poweroff -f
INIT
  chmod +x "$1"
}

prepare() {  # once per user: qemu, a kernel, and an initrd with a shell and the 9p modules
  local log=$cache/apt.log tree=$cache/initrd kernel module
  if ! { apt-get update -qq && apt-get install -y -qq qemu-system-x86 busybox-static cpio; } \
    >"$log" 2>&1; then
    tail -5 "$log" >&2
    return 3
  fi
  kernel=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image-[0-9]/{print $2; exit}')
  (cd "$cache" && apt-get download -q "$kernel" && rm -rf kernel \
    && dpkg -x "$kernel"_*.deb kernel && rm -f "$kernel"_*.deb) >>"$log" 2>&1 || return 3
  rm -rf "$tree"
  mkdir -p "$tree"/{bin,mods,proc,sys,new}
  cp /bin/busybox "$tree/bin/"
  for module in "${modules[@]}"; do
    find "$cache/kernel/lib/modules" -name "$module.ko" -exec cp {} "$tree/mods/" \;
  done
  write_init "$tree/init"
  touch "$cache/ready"
}

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9  # two runs at once: the second finds what the first has installed
[[ -f $cache/ready ]] || prepare || { echo "numa_vm: cannot install qemu and a kernel" >&2; exit 3; }
flock -u 9
[[ -z $prepare_only ]] || exit 0

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$cache/initrd" "$work/initrd"
{
  echo "export PATH=$(printf %q "$PATH") HOME=/run TMPDIR=/run PYTHONDONTWRITEBYTECODE=1 NUMA_VM=1"
  echo "cd $(printf %q "$PWD")"
  printf '%q ' "$@"
  echo
} >"$work/initrd/cmd"
(cd "$work/initrd" && find . | cpio -o -H newc --quiet | gzip -1) >"$work/initrd.gz"

numa=()
for ((i = 0; i < nodes; i++)); do
  numa+=(-object "memory-backend-ram,id=m$i,size=${mib}M" -numa "node,nodeid=$i,cpus=$i,memdev=m$i")
done
timeout "$limit" qemu-system-x86_64 -accel tcg,thread=multi -cpu max -smp "$nodes" \
  -m "$((nodes * mib))M" "${numa[@]}" \
  -kernel "$cache"/kernel/boot/vmlinuz-* -initrd "$work/initrd.gz" \
  -append "console=ttyS0 quiet panic=1" -nographic -no-reboot \
  -fsdev local,id=h,path=/,security_model=none,readonly=on,multidevs=remap \
  -device virtio-9p-pci,fsdev=h,mount_tag=hostroot \
  </dev/null >"$work/console" 2>&1 || true

tr -d '\r' <"$work/console" >"$work/text"
sed -n '/@@begin@@/,/@@exit [0-9]*@@/p' "$work/text" \
  | sed -e '1d' -e '$s/@@exit [0-9]*@@$//' -e '${/^$/d}'
status=$(sed -n 's/.*@@exit \([0-9]*\)@@.*/\1/p' "$work/text" | tail -1)
if [[ -z $status ]]; then
  echo "numa_vm: no answer in $limit s, or the guest did not boot:" >&2
  tail -5 "$work/text" >&2
  exit 124
fi
exit "$status"
