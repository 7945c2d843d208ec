#!/usr/bin/env bash
# Train the demo team anew: three tasks, each as fork-LoRA and as ordinary LoRA, into configs/demo/adapters.
# About half an hour on two idle cores with bfloat16 units. Usage: train_demo.sh [steps of the warm start] [steps of each]
#
# First one adapter learns all three tasks in turn as fork-LoRA; each of the six then starts from it. The allocator
# keeps freed memory, or a quarter of the time goes into page faults. Two processes of one thread each do more than
# one process of two threads.
set -euo pipefail
cd "$(dirname "$0")/../.."
warm_steps=${1:-160}
steps=${2:-120}
python=${PYTHON:-python}
adapters=configs/demo/adapters
warm=$(mktemp -d)
trap 'rm -rf "$warm"' EXIT
export MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=268435456

"$python" -u -m benchmarks.train.train_lora --task all --kind fork --steps "$warm_steps" --out "$warm" --threads 2

train() { # kind, suffix of the folder, tasks
    local kind=$1 suffix=$2 task
    shift 2
    for task in "$@"; do
        OMP_NUM_THREADS=1 "$python" -u -m benchmarks.train.train_lora --task "$task" --kind "$kind" --threads 1 \
            --init "$warm" --steps "$steps" --lr 6e-4 --out "$adapters/$task$suffix"
    done
}

{ train fork "" extract sql && train plain "-plain" audit; } &
first=$!
{ train fork "" audit && train plain "-plain" extract sql; } &
second=$!
wait "$first"
wait "$second"
