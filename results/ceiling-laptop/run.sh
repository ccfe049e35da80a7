#!/usr/bin/env bash
# Power (fitted) with other warmups and ceilings, and with merged checkpoints instead of a decay: the
# runs behind two tables of docs/log.md. Type it again to resume.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
OUT=${OUT:-runs/ceiling} JOBS=${JOBS:-2} COMPARE=${COMPARE:-results/compare-laptop}
SAME="--n_layer 2 --n_embd 64 --n_head 4 --dtype float32 --device cpu --eval_every 1e9 --resume
  --schedule power --power_b=-0.3 --power_q 1"

python - "$COMPARE" > "${TMPDIR:-/tmp}/cells" <<'P'  # seed, batch size, its tuned a
import sys
from pathlib import Path
import compare, records
_, best, _ = compare.losses_of_lines(records.read_records([Path(sys.argv[1])]))
for seed in (0, 1, 2):
    for batch_size in (2, 8):
        lr, where = best["Power (fitted)"][seed], (2, 128, 80_000)
        fields = compare.fields_of(compare.LINES["Power (fitted)"], lr, batch_size, 80_000, where)
        print(seed, batch_size, fields["power_a"])
P

while read -r seed batch a; do
    for T in 80000 1280000; do
        run="$(echo $SAME) --seed $seed --data_seed $seed --batch_size $batch --power_a $a --total_tokens $T"
        for warmup in 2000 8000 32000; do
            for lr_max in 0.005 0.01 0.02; do
                echo "$run --warmup_tokens $warmup --lr_max $lr_max --save_every 1e9" \
                    "--out $OUT/decay/$warmup-$lr_max-$batch-$T-$seed"
            done
        done
        echo "$run --warmup_tokens 32000 --decay_tokens 0 --average --save_every $((T / 100))" \
            "--keep_checkpoints 12 --out $OUT/held/$batch-$T-$seed"
    done
done < "${TMPDIR:-/tmp}/cells" | xargs -P "$JOBS" -I{} sh -c 'python train.py {} > /dev/null'

touch "$OUT/merged.jsonl"
for run in "$OUT"/held/*/; do
    name=$(basename "$run")
    for shape in linear 1-sqrt; do
        line="\"run\": \"$name\", \"shape\": \"$shape\""
        grep -q "$line" "$OUT/merged.jsonl" && continue
        python forks/merge.py "$run" --shape $shape --last 0.1 > /dev/null
        loss=$(python eval.py --model "$run/merged.pt" --device cpu | sed -E 's/.*: ([0-9.]+) nats.*/\1/')
        echo "{$line, \"val_loss\": $loss}" >> "$OUT/merged.jsonl"
    done
done
