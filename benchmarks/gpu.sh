#!/usr/bin/env bash
# What is to be seen on a machine with a CUDA device, in about half an hour: the tests that need one, decode against bandwidth,
# training against the peak, updates, both ends on one GPU, and two runs. Three parts of at most ten minutes, each of which may
# be called alone; every step has a time limit, and what fails does not keep the others from being seen. Ends with a table.
#   bash benchmarks/gpu.sh FOLDER [part1|part2|part3|table|all]
# It needs PyTorch for CUDA and this package (`pip install -e .`, or PYTHONPATH=src), and no network. Environment variables:
#   SIZE=1.5b (0.5b, tiny)   DEVICE=cuda   PYTHON=python
# To try the scripts without a GPU: DEVICE=cpu SIZE=tiny bash benchmarks/gpu.sh FOLDER
set -uo pipefail
out=${1:?where results go}
part=${2:-all}
python=${PYTHON:-python}
size=${SIZE:-1.5b}
device=${DEVICE:-cuda}
mkdir -p "$out"
failed=0
patience=1
if [ "$size" = tiny ]; then
    patience=10 # times are not looked at
    sizes=(--slots 2 4 --contexts 16 --micro-batch-tokens 2048 --seconds 2)
else
    sizes=()
fi
step() { # NAME SECONDS COMMAND...: its output in a file
    local name=$1 seconds=$(($2 * patience))
    shift 2
    echo "== $name"
    if ! timeout --kill-after=10 "$seconds" "$@" > "$out/$name.log" 2>&1; then
        failed=1
        echo "   FAILED"
    fi
    tail -n 8 "$out/$name.log"
}
measure() { # NAME SECONDS STEP ARGUMENTS...
    local name=$1 seconds=$2
    shift 2
    step "$name" "$seconds" "$python" -m benchmarks.gpu "$@" --out "$out" --size "$size" --device "$device" "${sizes[@]}"
}
part1() { # exact, and how fast is each end: 9 minutes
    step tests 240 "$python" -m pytest tests/gpu -m gpu -q -p no:cacheprovider -k "not learns"
    measure limits 30 limits
    measure decode 270 decode
}
part2() { # the trainer, updates, and both ends on one GPU: 10 minutes
    measure train 200 train
    measure update 90 update
    measure both 150 both
    if command -v nvidia-cuda-mps-control > /dev/null; then
        CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
        CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
        export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
        nvidia-cuda-mps-control -d
        measure both-mps 150 both --mps
        echo quit | nvidia-cuda-mps-control
        unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    else
        echo "there is no nvidia-cuda-mps-control here: both ends were measured without MPS only"
    fi
}
part3() { # vLLM, pipeline against conventional, and the demo: 9 minutes
    measure folder 60 folder
    measure vllm 150 vllm
    measure runs 270 runs
    step learns 90 "$python" -m pytest tests/gpu -m gpu -q -p no:cacheprovider -k learns
}
table() {
    "$python" -m benchmarks.gpu table --out "$out" || failed=1
}
case $part in
    part1 | part2 | part3) "$part" ;;
    all)
        part1
        part2
        part3
        ;;
    table) ;;
    *)
        echo "unknown part: $part" >&2
        exit 2
        ;;
esac
table
exit "$failed"
