#!/usr/bin/env bash
# Build a wheel with each named Python that is here, install it in an empty environment, and use it from another folder.
# torch is installed where pip has it on this machine; elsewhere the wheel goes without it, and what needs no torch is used.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
if [ "$1" != --from ]; then  # two at a time, each by itself, from one copy: the checkout may be compiled meanwhile
  copy=$(mktemp -d)
  trap 'rm -rf "$copy"' EXIT
  mkdir "$copy/source"
  tar c --exclude __pycache__ --exclude '*.so' --exclude compiled.sha256 \
    exogym_core netgym netsim topologies pyproject.toml setup.py README.md LICENSE | tar x -C "$copy/source"
  python3 -m venv --without-pip "$copy/pip"
  python3 -m pip --python "$copy/pip/bin/python" install --quiet --no-compile --constraint constraints.txt 'pip>=26'
  printf '%s\n' "$@" | xargs -P 2 -n 1 bash tests/wheels.sh --from "$copy"
  exit
fi
copy=$2 version=$3
python=$(ls -d "$HOME/.pyenv/versions/$version".*/bin/python 2>/dev/null | tail -1 || true)
python=${python:-$(command -v "python$version" || true)}
if [ -z "$python" ] || ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
  echo "Python $version is not here"
  exit
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
cp -r "$copy/source" source
printf '#!/bin/sh\nexec cc "$@" -O0\n' >cc && chmod +x cc  # a third of the time, and the same bits
# One pip serves all environments, which need none of their own; that of Python 3.11 would take three times as long.
pip() { "$copy/pip/bin/python" -m pip --python "$1/bin/python" "${@:2}"; }
add() { pip "$1" install --quiet --no-compile --constraint "$root/constraints.txt" "${@:2}"; }
"$python" -m venv --without-pip build && add build 'setuptools>=77' 'mypy>=1.15'
CC=$PWD/cc pip build wheel --quiet --no-deps --no-build-isolation --wheel-dir . ./source
"$python" -m venv --without-pip empty
if [ "$version" = "$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')" ]; then
  add empty torch
  add empty ./netgym-*.whl
  pip empty check
  add empty --dry-run "$(ls "$PWD"/netgym-*.whl)[soak]"  # the others are installed for the tests, and compared there
  printf '%s\n' 'task: {name: text, block_size: 8, num_bytes: 5000}' 'workers: {count: 2}' 'topology: lan' \
    'compute: 10 ms' 'steps: 2' 'device: cpu' 'model: {name: gpt, preset: byte, num_layers: 1, width: 8, num_heads: 1}' \
    'strategies: [AllReduce, {name: DiLoCo, H: 2}]' >small.yaml
  empty/bin/netgym compare small.yaml --out run >/dev/null
  empty/bin/netgym doctor
else
  "$python" -c 'import tomllib; print("\n".join(each for each in
    tomllib.load(open("source/pyproject.toml", "rb"))["project"]["dependencies"] if not each.startswith("torch")))' >needed.txt
  add empty --requirement needed.txt
  add empty --no-deps ./netgym-*.whl
  empty/bin/netgym list >/dev/null
fi
empty/bin/python -c 'from netsim.network.build import engine_state; assert engine_state() == "compiled", engine_state()'
empty/bin/netsim collective wan-4-regions all_reduce --bytes 100MB >/dev/null
echo "Python $version: $(ls netgym-*.whl) works"
