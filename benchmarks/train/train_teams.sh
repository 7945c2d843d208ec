#!/usr/bin/env bash
# Train teams of the demo's three agents with the same data, steps and rank: by default fork-LoRA and ordinary LoRA,
# the demo team, into configs/demo/adapters. About an hour and a half on two idle cores with bfloat16 matrix units. As
# long again take further rounds of fork-LoRA, which after as many steps is not where the others are; ROUNDS=0 leaves
# them out.
#
#   KINDS="plain alora shared-a fork" ADAPTERS=build/adapters train_teams.sh [steps of the warm start] [steps of each]
#
# Further arguments go to every run of train_lora.py.
#
# First one adapter learns all three tasks in turn, as fork-LoRA for the kinds that read base-written K and V and as
# ordinary LoRA for the others; every agent's adapter then starts from it. WARM names a folder for these two, which are
# taken as they are if they are there. The allocator keeps freed memory, or a quarter of the time goes into page
# faults. Two processes of one thread each do more than one process of two threads.
set -euo pipefail
cd "$(dirname "$0")/../.."
export warm_steps=${1:-240} steps=${2:-150} options=${*:3}
export python=${PYTHON:-python} adapters=${ADAPTERS:-configs/demo/adapters} warm=${WARM:-}
if [ -z "$warm" ]; then
    warm=$(mktemp -d)
    trap 'rm -rf "$warm"' EXIT
fi
export MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=268435456

warm_kind() { # kind: whose warm start it takes
    case "$1" in fork | alora) echo fork ;; *) echo plain ;; esac
}

rate() { # kind: its learning rate; what base weights left in the cache is harder to learn to read
    case "$1" in fork | alora) echo 2e-3 ;; *) echo 6e-4 ;; esac
}

run() { # arguments of train_lora.py
    OMP_NUM_THREADS=1 "$python" -u -m benchmarks.train.train_lora --threads 1 "$@" $options
}

warm_up() { # kind
    [ -e "$warm/$1/adapter_model.safetensors" ] || run --task all --kind "$1" --steps "$warm_steps" --out "$warm/$1"
}

train() { # kind, task
    local suffix="-$1"
    [ "$1" != fork ] || suffix=""
    run --task "$2" --kind "$1" --init "$warm/$(warm_kind "$1")" --steps "$steps" --lr "$(rate "$1")" \
        --out "$adapters/$2$suffix"
}

further() { # task: further rounds of fork-LoRA, each at a rate that falls to zero again
    while read -r task steps rate longest seed; do
        [ "$task" != "$1" ] || run --task "$1" --kind fork --init "$adapters/$1" --steps "$steps" --lr "$rate" \
            --max-tokens "$longest" --seed "$seed" --out "$adapters/$1" < /dev/null
    done <<< "$rounds"
}
export -f warm_kind rate run warm_up train further

# task, steps, rate, tokens of the longest document, seed
export rounds="
extract 300 1e-3 1100 1
audit 300 1e-3 1100 1
sql 240 1e-3 1100 1
extract 400 1.5e-3 1100 2
audit 400 1.5e-3 1100 2
audit 540 1.5e-3 1500 3
sql 400 1.5e-3 1500 3"

two_at_a_time() { xargs -P 2 -L 1 bash -euo pipefail -c '"$@"' -; }
for kind in ${KINDS:-fork plain}; do echo "warm_up $(warm_kind "$kind")"; done | sort -u | two_at_a_time
for kind in ${KINDS:-fork plain}; do
    for task in extract sql audit; do echo "train $kind $task"; done
done | two_at_a_time
if [[ " ${KINDS:-fork plain} " == *" fork "* && "${ROUNDS:-1}" != 0 ]]; then
    for task in audit extract sql; do echo "further $task"; done | two_at_a_time
fi
