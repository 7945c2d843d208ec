#!/usr/bin/env bash
# Train the demo team anew: three tasks, each as fork-LoRA and as ordinary LoRA, into configs/demo/adapters.
# About an hour on two cores. Usage: benchmarks/train/train_demo.sh [steps of each adapter]
#
# Two processes of one thread each do more than one process of two threads. The allocator keeps freed memory, or a
# quarter of the time goes into page faults.
set -euo pipefail
cd "$(dirname "$0")/../.."
steps=${1:-120}
python=${PYTHON:-python}
export OMP_NUM_THREADS=1
export MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=268435456

train() { # kind, suffix of the folder, tasks
    local kind=$1 suffix=$2 task
    shift 2
    for task in "$@"; do
        nice -n 5 "$python" -u -m benchmarks.train.train_lora --task "$task" --kind "$kind" --threads 1 \
            --steps "$steps" --out "configs/demo/adapters/$task$suffix"
    done
}

{ train fork "" extract sql && train plain "-plain" audit; } &
first=$!
{ train fork "" audit && train plain "-plain" extract sql; } &
second=$!
wait "$first"
wait "$second"
