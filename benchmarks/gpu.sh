#!/usr/bin/env bash
# All that is to be seen on a machine with a CUDA device: the tests that need one, the engine beside transformers' own, and two
# real runs with both ends on it. Some ten minutes on one GPU; results go to FOLDER.
#   bash benchmarks/gpu.sh FOLDER [MODEL_FOLDER]
# It needs PyTorch for CUDA and this package (`pip install -e .`, or PYTHONPATH=src), and no network.
set -uo pipefail
out=${1:?where results go}
model=${2:-demo}
python=${PYTHON:-python}
mkdir -p "$out"
failed=0
step() { # NAME COMMAND...: its output in a file; what fails does not keep the others from being seen
    local name=$1
    shift
    echo "== $name"
    if ! "$@" > "$out/$name.log" 2>&1; then
        failed=1
        echo "   FAILED"
    fi
    tail -n 8 "$out/$name.log"
}
train() { "$python" -c 'import sys; from pipelinerl.cli import main; sys.exit(main())' train --metrics.view plain "$@"; }

step tests "$python" -m pytest tests/gpu -m gpu -p no:cacheprovider
step engine-demo "$python" -m benchmarks.engine --device cuda --slots 8 64 256 --repetitions 3 --name engine-demo-gpu --results "$out"
if [ "$model" != demo ]; then
    step engine-model "$python" -m benchmarks.engine --device cuda --dtype bfloat16 --model "$model" --prompt-tokens 64 \
        --slots 8 64 256 --waves 2 --equal-waves 1 --repetitions 3 --name engine-model-gpu --results "$out"
    step run-model train examples/smollm2_sums.yaml --model.path "$model" --engine.device cuda --trainer.device cuda \
        --run_dir "$out/run-model"
fi
step run-demo train --engine.device cuda --trainer.device cuda --run_dir "$out/run-demo"
exit "$failed"
