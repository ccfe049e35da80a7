#!/usr/bin/env bash
# Which ceiling should a Power run have that follows a law? A small sweep for a law, then Power with
# four ceilings, and WSD at the learning rate of the law, at 16 and 64 times the shortest T of the
# sweep. A ceiling is the law at some n. At n = W, the end of the warmup, it equals no ceiling,
# because the law only falls. Type it again to resume.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
OUT=${OUT:-runs/ceiling-rule} JOBS=${JOBS:-2} SEEDS=${SEEDS:-0 1 2}
W=2000  # warmup of the sweep
SHORTEST=20000

python sweep.py wsd --scale quick --batches 4,8 --budgets 20k,40k,80k,160k --out "$OUT/law"
python fit.py "$OUT/law"

rate() {  # the best learning rate of the law for a run of $1 tokens at batch size 8
    python - "$OUT/law/law.json" "$1" <<'P'
import json, sys
import fit
law = json.load(open(sys.argv[1]))
print(f"{fit.predict(law, float(sys.argv[2]), 8 * law['seq_len']):.4g}")
P
}
power=$(python -c "import json; law = json.load(open('$OUT/law/law.json'))
print('--power_a {a} --power_b {b} --power_q {q}'.format(**law))")
SAME="--n_layer 2 --n_embd 32 --n_head 2 --dtype float32 --device cpu --warmup_tokens $W
  --batch_size 8 --eval_every 1e9 --save_every 1e9 --log_every 1e6 --resume"

one_seed() {  # the ceilings of one seed; the long run is a branch of the short one
    same="$(echo $SAME) --seed $1 --data_seed $1"
    for T in $((16 * SHORTEST)) $((64 * SHORTEST)); do
        python train.py $same --schedule wsd --lr "$(rate $T)" --total_tokens $T \
            --out "$OUT/wsd-$T-$1" > /dev/null
    done
    for n in $W $((2 * W)) $SHORTEST $((4 * SHORTEST)); do
        short="$OUT/$n-$((16 * SHORTEST))-$1"
        python train.py $same --schedule power $power --lr_max "$(rate $n)" \
            --total_tokens $((16 * SHORTEST)) --out "$short" > /dev/null
        long="$OUT/$n-$((64 * SHORTEST))-$1"
        flags="--branch $short --total_tokens $((64 * SHORTEST))"
        if [ -e "$long" ]; then flags=""; fi  # a resumed run has them already
        python train.py $flags --resume --out "$long" > /dev/null
    done
}
for seed in $SEEDS; do
    one_seed "$seed" &
    if [ "$(jobs -r | wc -l)" -ge "$JOBS" ]; then wait -n; fi
done
wait
