#!/usr/bin/env bash
# The demo on three seeds, one after another on an otherwise idle machine; keeps the summaries.
#   bash benchmarks/demo_seeds.sh FOLDER_FOR_THE_RUNS
set -euo pipefail
runs=${1:?where the runs go}
for seed in 0 1 2; do
  .venv/bin/pipelinerl train --seed "$seed" --run_dir "$runs/seed-$seed" --metrics.view plain
  cp "$runs/seed-$seed/summary.json" "benchmarks/results/demo/seed-$seed.json"
done
