#!/usr/bin/env bash
# Makes .venv with everything this project needs; does nothing when that is already done.
#
#   tools/setup.sh            the package and its development tools
#
# torch: where an NVIDIA GPU is present, PyPI's CUDA build; elsewhere the CPU build (200 MB in place
# of several GB), from PyTorch's own index or, where that cannot be reached, from the ones pip knows.
# PYTHON=/path/to/python3.12 picks the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly TORCH_CPU="torch==2.13.0"  # the release that CI tests; without a pin PyPI serves a CUDA build
readonly CPU_INDEX="https://download.pytorch.org/whl/cpu"

say() { printf 'setup: %s\n' "$*" >&2; }

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
    if [[ -n $candidate ]] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  say "no Python 3.11 or newer was found"
  say "hint: install one, then: PYTHON=/path/to/python3 make setup"
  exit 1
}

make_venv() {
  local python=$1
  "$python" -m venv .venv 2>/dev/null && return
  rm -rf .venv
  if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    say "installing python3-venv"
    apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null
    "$python" -m venv .venv && return
  fi
  say "$python cannot make a virtual environment"
  say "hint: install python3-venv (Debian, Ubuntu: apt-get install python3-venv)"
  exit 1
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

install_torch() {
  .venv/bin/python -c 'import torch' 2>/dev/null && return
  if has_gpu; then
    say "installing torch with CUDA (several GB)"
    pip_install "torch>=2.11"
  elif pip_install --retries 0 --timeout 15 --index-url "$CPU_INDEX" "$TORCH_CPU" 2>/dev/null; then
    say "installed the CPU build of torch"
  else
    say "$CPU_INDEX is out of reach; installing $TORCH_CPU from pip's own indexes"
    pip_install "$TORCH_CPU"
  fi
}

pip_install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }

stamp=.venv/setup-$(cat pyproject.toml tools/setup.sh | sha256sum | cut -c1-16)
[[ -f $stamp ]] && exit 0
[[ -x .venv/bin/python ]] || make_venv "$(find_python)"
say "installing into .venv (a few minutes the first time)"
install_torch
pip_install --editable ".[dev]"
touch "$stamp"
say "done"
