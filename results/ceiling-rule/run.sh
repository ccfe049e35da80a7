#!/usr/bin/env bash
# Which ceiling should a Power run have that follows a law? Here it is the law of results/wsd-laptop
# at some n, at width 32 and batch size 8, with the short warmup W of that sweep. At n = W it equals
# no ceiling, because the law only falls. At n = 80k, it is the law at the shortest T of the sweep.
# The runs take 16 and 64 times this T. Type it again to resume.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
OUT=${OUT:-runs/ceiling-rule} JOBS=${JOBS:-2} SEEDS=${SEEDS:-0 1 2 3 4}
LENGTHS=${LENGTHS:-1280000 5120000}
W=2000

rate() {  # the learning rate of the law for $1 tokens
    python fit.py --predict --total_tokens "$1" --batch_size 8 --law results/wsd-laptop/law.json \
        2> /dev/null
}
power=$(python -c "import json; law = json.load(open('results/wsd-laptop/law.json'))
print('--power_a {a:.6g} --power_b {b:.5f} --power_q {q:.5f}'.format(**law))")
SAME="--n_layer 2 --n_embd 32 --n_head 2 --dtype float32 --device cpu --warmup_tokens $W
  --batch_size 8 --eval_every 1e9 --save_every 1e9 --log_every 1e6 --resume"

for T in $LENGTHS; do
    for seed in $SEEDS; do
        same="$(echo $SAME) --seed $seed --data_seed $seed --total_tokens $T"
        for n in $W 80000 $((2 * W)) 320000; do
            echo "$same --schedule power $power --lr_max $(rate $n) --out $OUT/$n-$T-$seed"
        done
        echo "$same --schedule wsd --lr $(rate $T) --out $OUT/wsd-$T-$seed"
    done
done | xargs -P "$JOBS" -I{} sh -c 'mkdir -p '"$OUT"' && python train.py {} > /dev/null'
