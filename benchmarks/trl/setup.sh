#!/usr/bin/env bash
# Makes an environment for TRL, which shares torch, transformers and vLLM with the project's .venv and adds only what
# benchmarks/trl/requirements.txt names. The project's own environment stays as it is.
#
#   benchmarks/trl/setup.sh [directory]     default: outputs/trl-venv; VENV=path: where the project's environment is
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

target="${1:-outputs/trl-venv}"
project="$(realpath "${VENV:-.venv}")"
if [[ ! -x "$project/bin/python" ]]; then
  echo "setup: $project must be the project's environment; it holds no bin/python. Run \`make setup\` first." >&2
  exit 1
fi
"$project/bin/python" -m venv --without-pip "$target"
"$project/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
  >"$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"
"$project/bin/python" -m pip --python "$target/bin/python" --disable-pip-version-check --no-input \
  install --quiet --no-deps --requirement benchmarks/trl/requirements.txt
"$target/bin/python" -c 'import trl, transformers; print(f"setup: TRL {trl.__version__}, transformers {transformers.__version__}")'
