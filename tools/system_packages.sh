#!/usr/bin/env bash
# Commands that some tests start: ipcs and unshare (util-linux), ip (iproute2). Installs them where
# root and apt-get are at hand; elsewhere the tests that lack one are skipped and say so.
set -euo pipefail
missing=()
for pair in ipcs:util-linux unshare:util-linux ip:iproute2; do
  command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
[[ ${#missing[@]} -gt 0 ]] || exit 0
if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
  apt-get update -qq && apt-get install -y -qq "${missing[@]}" >/dev/null
else
  printf 'not installed: %s\nhint: install %s to run all tests\n' "${missing[*]}" "${missing[*]}" >&2
fi
