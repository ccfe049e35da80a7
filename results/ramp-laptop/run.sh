#!/usr/bin/env bash
# A growing batch size against a falling learning rate: the runs behind docs/log.md. Type it again
# to resume. Four methods try nine values each in a short run, and keep the best for all lengths.
# Needs `git apply forks/batch_ramp.patch`.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
OUT=${OUT:-runs/ramp} JOBS=${JOBS:-2} B=-0.3
RAMP=8@0,16@150e3,32@530e3,64@1.87e6  # 8 (n / 80k)^0.55 in powers of 2, from b -0.3 and q 0.55
SAME="--n_layer 2 --n_embd 64 --n_head 4 --dtype float32 --device cpu --final_eval_tokens 65536
  --warmup_tokens 80000 --eval_every 1e9 --save_every 1e9 --resume"

flags() {  # method, value
    case $1 in
        wsd)        echo "--schedule wsd --batch_size 8 --lr $2" ;;
        wsd-ramp)   echo "--schedule wsd --batch_size 8 --batch_ramp $RAMP --lr $2" ;;
        power)      echo "--schedule power --batch_size 8 --power_b=$B --power_q 1 --power_a $2" ;;
        power-ramp) echo "--schedule power --batch_size 8 --batch_ramp $RAMP \
            --power_b=$B --power_q 1 --power_a $2" ;;
    esac
}

line() {  # method, value, tokens, seed, folder -> the flags of a run on one line
    echo $SAME $(flags $1 $2) --total_tokens $3 --seed $4 --data_seed $4 --out $OUT/$5
}

train() { xargs -P "$JOBS" -I{} sh -c 'python train.py {} > /dev/null'; }

best() {  # method -> the value with the lowest mean loss
    grep -H '"val_loss"' "$OUT"/tune/"$1"-[0-9]*/record.json | python -c '
import collections, re, sys
losses = collections.defaultdict(list)
for line in sys.stdin:
    value, loss = re.search(r"-([\d.]+)-\d+/record.json:.*: ([\d.]+|null)", line).groups()
    losses[float(value)].append(float("inf") if loss == "null" else float(loss))
print(min(losses, key=lambda value: sum(losses[value])))'
}

for method in wsd wsd-ramp power power-ramp; do
    values="0.0032 0.00453 0.0064 0.00905 0.0128 0.0181 0.0256 0.0362 0.0512"
    [[ $method == power* ]] && values="0.354 0.5 0.707 1 1.41 2 2.83 4 5.66"
    for value in $values; do
        for seed in 100 101 102; do
            line $method $value 320000 $seed tune/$method-$value-$seed
        done
    done
done | train
for method in wsd wsd-ramp power power-ramp; do
    value=$(best $method)
    echo "$method: $value" >&2
    for T in 640000 1280000 2560000 5120000; do
        for seed in 0 1 2; do
            line $method $value $T $seed test/$method-$T-$seed
        done
    done
done | train
