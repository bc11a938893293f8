#!/bin/bash
# A run on a SLURM allocation: a Ray cluster for the duration of the job, with the script on its head.
#   sbatch examples/clusters/slurm.sh examples/grpo_gsm8k.py --model MODEL --data DATA --gpus 16
# Call sbatch in a folder that all nodes share, with Weft in its .venv.
#SBATCH --job-name=weft
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
# SIGTERM arrives ten minutes before the end and on preemption: the run saves, and the requeued job resumes.
#SBATCH --signal=B:TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
source .venv/bin/activate

nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
head=$(srun --nodes=1 --ntasks=1 -w "${nodes[0]}" hostname --ip-address | awk '{print $1}')
port=$((20000 + SLURM_JOB_ID % 10000))
umask 077
token="$PWD/.ray-token-$SLURM_JOB_ID"
head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$token"
trap 'rm -f "$token"' EXIT
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$token"
gpus=${SLURM_GPUS_ON_NODE:-0} cpus=$SLURM_CPUS_PER_TASK

srun --nodes=1 --ntasks=1 -w "${nodes[0]}" \
  ray start --head --node-ip-address="$head" --port="$port" --num-cpus="$cpus" --num-gpus="$gpus" --block &
for node in "${nodes[@]:1}"; do
  srun --nodes=1 --ntasks=1 -w "$node" \
    ray start --address="$head:$port" --num-cpus="$cpus" --num-gpus="$gpus" --block &
done

# The run waits for joining nodes. Only the run gets the signal; Ray ends with the allocation.
export RAY_ADDRESS="$head:$port" WEFT_ROOT="$PWD/weft/$SLURM_JOB_ID" WEFT_RESUME=latest
for _ in $(seq 60); do ray status > /dev/null 2>&1 && break; sleep 5; done
python "$@" &
run=$!
stopped=0
trap 'stopped=1; kill -TERM $run' TERM
code=0
wait $run || code=$?
if [ "$stopped" = 1 ]; then  # the signal ended the wait, and the run is still saving
  code=0
  wait $run || code=$?
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
