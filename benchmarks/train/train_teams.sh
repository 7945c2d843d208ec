#!/usr/bin/env bash
# Train teams of the demo's three agents with the same data, steps and rank: by default fork-LoRA and ordinary LoRA,
# the demo team, into configs/demo/adapters. About half an hour on two idle cores with bfloat16 units.
#
#   KINDS="plain alora shared-a fork" ADAPTERS=build/adapters train_teams.sh [steps of the warm start] [steps of each]
#
# Further arguments go to every run of train_lora.py.
#
# First one adapter learns all three tasks in turn as fork-LoRA; every other one then starts from it. WARM names a
# folder for it, which is taken as it is if it is there. The allocator keeps freed memory, or a quarter of the time goes
# into page faults. Two processes of one thread each do more than one process of two threads.
set -euo pipefail
cd "$(dirname "$0")/../.."
export warm_steps=${1:-160} steps=${2:-120} options=${*:3}
export python=${PYTHON:-python} adapters=${ADAPTERS:-configs/demo/adapters} warm=${WARM:-}
if [ -z "$warm" ]; then
    warm=$(mktemp -d)
    trap 'rm -rf "$warm"' EXIT
fi
export MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=268435456

if [ ! -e "$warm/adapter_model.safetensors" ]; then
    "$python" -u -m benchmarks.train.train_lora --task all --kind fork --steps "$warm_steps" --out "$warm" --threads 2 \
        $options
fi

train() { # kind, task
    local suffix="-$1"
    [ "$1" != fork ] || suffix=""
    OMP_NUM_THREADS=1 "$python" -u -m benchmarks.train.train_lora --task "$2" --kind "$1" --threads 1 \
        --init "$warm" --steps "$steps" --lr 6e-4 --out "$adapters/$2$suffix" $options
}
export -f train

for kind in ${KINDS:-fork plain}; do
    for task in extract sql audit; do echo "$kind $task"; done
done | xargs -P 2 -L 1 bash -euo pipefail -c 'train "$1" "$2"' train
