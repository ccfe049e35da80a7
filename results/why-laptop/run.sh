#!/usr/bin/env bash
# What makes the best learning rate fall: the runs behind docs/why.md. Type it again to resume.
# Once it has begun the second seed, resume with `run.sh 2`, and with `run.sh 3` in the third.
# Needs `git apply forks/memory.patch`. About three hours for each seed on two cores.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
OUT=${OUT:-runs/why} JOBS=${JOBS:-2}
ALL=320k,640k,1.28M,2.56M,5.12M

sweep() {  # folder, number of seeds, batch sizes, lengths, warmup, flags
    local folder=$1 seeds=$2 batches=$3 budgets=$4 warmup=$5
    shift 5
    python sweep.py wsd --scale laptop --compile --workers "$JOBS" --widths 32 --seeds "$seeds" \
        --batches "$batches" --budgets "$budgets" --warmup_tokens "$warmup" --out "$OUT/$folder" "$@"
}

for seeds in $(seq "${1:-1}" 3); do
    sweep norm-all $seeds 2,8,32 $ALL 80000 --weight_decay 0 --fixed_norm all
    sweep memory-1 $seeds 2,8,32 $ALL 80000 --memory 1
    sweep wd-0 $seeds 2,8,32 $ALL 80000 --weight_decay 0
    sweep norm-hidden $seeds 2,8,32 $ALL 80000 --weight_decay 0 --fixed_norm hidden
    sweep wd-0.1 $seeds 2,8,32 $ALL 80000 --weight_decay 0.1
    sweep memory-5 $seeds 2,8,32 $ALL 80000 --memory 5
    sweep memory-0.2 $seeds 2,8,32 $ALL 80000 --memory 0.2
    sweep per-T/320k $seeds 2,8,32 320k 80000 --weight_decay 0.4
    sweep per-T/640k $seeds 2,8,32 640k 80000 --weight_decay 0.2
    sweep per-T/1.28M $seeds 2,8,32 1.28M 80000 --weight_decay 0.1
    sweep per-T/2.56M $seeds 2,8,32 2.56M 80000 --weight_decay 0.05
    sweep per-T/5.12M $seeds 2,8,32 5.12M 80000 --weight_decay 0.025
    sweep ceiling $seeds 8,32 640k,1.28M,2.56M,5.12M 320000 --weight_decay 0
    sweep wd-0.3 $seeds 2,8,32 $ALL 80000 --weight_decay 0.3
    sweep wd-0.01 $seeds 8 $ALL 80000 --weight_decay 0.01
    sweep wd-0.03 $seeds 8 $ALL 80000 --weight_decay 0.03
done
