#!/usr/bin/env bash
# speculators, the public EAGLE-3 trainer beside vLLM, on the CPU, and of SpecForge, the one beside
# SGLang, what reads its files. See README.md.
#   speculators_cpu.sh setup DIR   make a venv in DIR and install them into it
set -euo pipefail

SPECULATORS=0.9.0
SPECFORGE=0.2.0

die() { echo "speculators_cpu.sh: $*" >&2; exit 1; }
usage() { sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }

setup() {
  local dir=$1 python=${PYTHON:-python3}
  local stamp=$dir/.speculators-cpu-$SPECULATORS-$SPECFORGE pip=("$dir/bin/python" -m pip --quiet)
  if [ -e "$stamp" ]; then echo "speculators $SPECULATORS and SpecForge $SPECFORGE are already installed in $dir"; return; fi
  "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
    || die "$python is not Python 3.11; name one with PYTHON=..."
  "$python" -m venv "$dir" || die "cannot make a venv in $dir"
  "${pip[@]}" install torch==2.13.0
  "$dir/bin/python" -c 'from importlib.metadata import version as v; assert v("torch") == "2.13.0+cpu", v("torch")' \
    || die "pip found a torch that is not the CPU build 2.13.0+cpu"
  "${pip[@]}" install torch==2.13.0 speculators==$SPECULATORS
  # Its requirements (CUDA, another torch) cannot be met here; its data plane needs none of them.
  "${pip[@]}" install --no-deps specforge==$SPECFORGE
  # These come as CUDA builds, which break the import of transformers; text models do not need them.
  "${pip[@]}" uninstall --yes torchvision torchaudio
  "$dir/bin/python" -W ignore -c 'import speculators.train.data, specforge.runtime.data_plane.offline_reader' \
    || die "they were installed in $dir but cannot be imported"
  touch "$stamp"
  echo "speculators $SPECULATORS and SpecForge $SPECFORGE are installed in $dir"
}

case "${1:-}:$#" in
  setup:2) setup "$2" ;;
  *) usage ;;
esac
