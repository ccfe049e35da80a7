# The default run under Power with decays of 30% and of 10%, from one trunk, and under linear
# to 0, with three seeds. Run it in the folder of the project, and one thread for each run.
export OMP_NUM_THREADS=1
for seed in 0 1 2; do
  how="--dtype float32 --device cpu --seed $seed --data_seed $seed"
  run=runs/laptop-decay/power-3200000-30-$seed
  python train.py --schedule power --decay_share 0.3 $how --out $run
  python train.py --branch $run --decay_share 0.1 --total_tokens 3.2M --out runs/laptop-decay/power-3200000-10-$seed
  python train.py --schedule linear --lr 0.0085 $how --out runs/laptop-decay/linear-3200000-$seed
done
