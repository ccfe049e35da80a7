# The default run under Power with decays of 30% and 10%, and under linear to 0, with three
# seeds. Run it in the folder of the project. Linear's peak follows T^-0.12 from 0.0085.
one() { # SEED
  how="--dtype float32 --device cpu --eval_every 40000 --eval_tokens 65536 --log_every 1e9"
  how="$how --final_eval_tokens 65536 --seed $1 --data_seed $1"
  run=runs/curves/power-3200000-30-$1
  python train.py --schedule power --decay_share 0.3 --save_every 40000 --keep_checkpoints 99 $how --out $run
  before() { # TOKENS: the last checkpoint until there
    ls $run/ckpt/*.pt | awk -F/ -v n=$1 '{ if ($NF + 0 <= n) print }' | tail -n 1
  }
  python train.py --branch $(before 2240000) --decay_share 0.1 --total_tokens 3200000 --out runs/curves/power-3200000-10-$1
  for T in 400000 800000 1600000; do
    python train.py --branch $(before $((T * 7 / 10))) --decay_share 0.3 --total_tokens $T --out runs/curves/power-$T-30-$1
  done
  for pair in 400000:0.01091 800000:0.01004 1600000:0.009237 3200000:0.0085; do
    python train.py --schedule linear --lr ${pair#*:} --total_tokens ${pair%:*} $how --out runs/curves/linear-${pair%:*}-$1
  done
}
for seed in 0 1 2; do one $seed; done
