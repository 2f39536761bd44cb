#!/usr/bin/env bash
# What is to be seen on a machine with a CUDA device, in some twelve minutes: the tests that need one, decode against bandwidth,
# training against the peak, updates, both ends on one GPU, and two runs. Two parts of about six minutes, each of which may be
# called alone; every step has a time limit, and what fails does not keep the others from being seen. Ends with a table.
#   bash benchmarks/gpu.sh FOLDER [part1|part2|vllm|table|all]
# FOLDER.tgz has the results and logs, without the model. It needs PyTorch for CUDA and this package (`pip install -e .`, or
# PYTHONPATH=src), and no network. Environment variables:
#   SIZE=1.5b (0.5b, tiny)   DEVICE=cuda:0   PYTHON=python3
# To try the scripts without a GPU: DEVICE=cpu SIZE=tiny bash benchmarks/gpu.sh FOLDER
set -uo pipefail
out=${1:?where results go}
part=${2:-all}
python=${PYTHON:-python3}
size=${SIZE:-1.5b}
device=${DEVICE:-cuda:0}
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
    local begin=$SECONDS
    if ! timeout --kill-after=10 "$seconds" "$@" > "$out/$name.log" 2>&1; then
        failed=1
        echo "   FAILED"
    fi
    tail -n 14 "$out/$name.log"
    echo "   $((SECONDS - begin)) s"
}
measure() { # NAME SECONDS STEP ARGUMENTS...
    local name=$1 seconds=$2
    shift 2
    step "$name" "$seconds" "$python" -m benchmarks.gpu "$@" --out "$out" --size "$size" --device "$device" "${sizes[@]}"
}
part1() { # exact, and how fast is the engine
    measure limits 90 limits
    step tests 180 "$python" -m pytest tests/gpu -m gpu -q -p no:cacheprovider -k "not learns"
    measure decode 150 decode
    measure refill 150 refill
    measure update 90 update
}
part2() { # the trainer, both ends on one GPU, pipeline against conventional, and the demo
    measure train 120 train
    measure shared 90 shared
    measure both 100 both
    measure folder 60 folder
    if command -v nvidia-cuda-mps-control > /dev/null; then
        CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
        CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
        export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
        nvidia-cuda-mps-control -d
        measure both-mps 100 both --mps
        measure runs-mps 120 runs --mps --schedules pipeline
        echo quit | nvidia-cuda-mps-control
        unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    else
        echo "there is no nvidia-cuda-mps-control here: both ends and runs were measured without MPS only"
    fi
    measure runs 200 runs
    step learns 150 "$python" -m pytest tests/gpu -m gpu -q -p no:cacheprovider -k learns
}
vllm() {
    [ -e "$out/model" ] || measure folder 60 folder
    measure vllm 200 vllm
}
case $part in
    part1 | part2 | vllm) "$part" ;;
    all)
        part1
        part2
        vllm
        ;;
    table) ;;
    *)
        echo "unknown part: $part" >&2
        exit 2
        ;;
esac
"$python" -m benchmarks.gpu table --out "$out" || failed=1
tar czf "$out.tgz" -C "$out" --exclude=model --exclude='run-*' .
exit "$failed"
