#!/usr/bin/env bash
# One Power run with decays at four lengths, and a cosine planned for each of them: the runs behind
# the first two figures of README.md. Type it again to resume. About 20 minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
OUT=${OUT:-runs/curves}
# the default run, looked at more often, always on the same validation text
SAME="--eval_tokens 65536 --final_eval_tokens 65536 --log_every 1e9 --resume"
STEP=359424  # tokens between checkpoints: the whole steps of 1,024 tokens in 360,000

train() { python train.py $SAME "$@" > /dev/null; }

power() {  # seed
    local trunk=$OUT/power-trunk-$1
    train --schedule power --seed $1 --data_seed $1 --average --decay_tokens 0 --eval_every 40000 \
        --save_every $STEP --keep_checkpoints 9 --out $trunk
    for shares in 1 2 4 8; do  # the decay to T = 400k is at the first checkpoint, and so on
        train --branch $trunk/ckpt/$(printf %016d $((shares * STEP))).pt --total_tokens $((shares * 400000)) \
            --decay_tokens $((shares * 40000)) --eval_every 10000 --out $OUT/power-$((shares * 400000))-$1
    done
}

cosines() {  # seed. At T = 3.2M the learning rate is the tuned one, elsewhere it follows T^-0.3, our law
    while read -r T lr; do
        train --schedule cosine --lr $lr --total_tokens $T --seed $1 --data_seed $1 --eval_every 40000 \
            --out $OUT/cosine-$T-$1
    done <<< "400000 0.01493
800000 0.01213
1600000 0.00985
3200000 0.008"
}

for seed in 0 1 2; do
    power $seed & cosines $seed & wait
done
