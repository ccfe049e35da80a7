# The default run with one seed, as in: bash research/results/laptop-decay/run.sh 0
#
# One Power run and one WSD run, each decayed for 30% at four lengths, Power also for 10% and
# not at all, and linear to 0 and cosines, each planned for one length. Run it in the folder of the project. A stopped
# script continues.
seed=$1
out=runs/laptop-decay
export OMP_NUM_THREADS=1
train="python train.py --dtype float32 --device cpu --seed $seed --data_seed $seed --eval_every 80000 --resume"
save="--save_every 40000 --keep_checkpoints 99"

before() { # the last checkpoint of a run with at most so many tokens
  ls $out/$1/ckpt/*.pt | awk -F/ -v most=$2 '{ if ($NF + 0 <= most) print }' | tail -n 1
}

branch() { # schedule, total tokens, percent that decays
  name=$1-$2-$3-$seed
  [ -f $out/$name/record.json ] || python train.py --total_tokens $2 --decay_share 0.$3 --eval_every 80000 \
    --branch $(before $1-3200000-30-$seed $(($2 * (100 - $3) / 100))) --out $out/$name
}

for schedule in power wsd; do
  $train --schedule $schedule --decay_share 0.30 $save --out $out/$schedule-3200000-30-$seed
  for tokens in 400000 800000 1600000; do
    branch $schedule $tokens 30
  done
done
branch power 3200000 10
name=power-3200000-0-$seed  # without a decay
[ -f $out/$name/record.json ] || python train.py --branch $out/power-3200000-30-$seed \
  --decay_share 0 --eval_every 80000 --out $out/$name

# Peaks: linear at 0.0085 for all lengths, cosines where they were lowest in earlier runs
for tokens in 400000 800000 1600000 3200000; do
  $train --schedule linear --lr 0.0085 --total_tokens $tokens --out $out/linear-$tokens-$seed
done
cosine() {
  $train --schedule cosine --lr $2 --total_tokens $1 --out $out/cosine-$1-$seed
}
cosine 400000 0.01493
cosine 800000 0.01213
cosine 1600000 0.00985
cosine 3200000 0.008
