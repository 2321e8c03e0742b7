#!/usr/bin/env bash
# A run on Slurm: a Ray node on each machine of the job, the command on the first; all end with the command.
#
#   sbatch slurm.sh            begins the run, or resumes it
#
# Change the lines marked CHANGE. docs/cluster.md explains each part.
# CHANGE: the number of machines, what each of them has, and the time.
#SBATCH --job-name=gsm8k-grpo
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@180
#SBATCH --output=%x-%j.log

set -euo pipefail

SHARED=${SHARED:-$HOME} # CHANGE: a directory on a disk that all machines share
TRAINERS=2              # CHANGE: machines that train; the others sample
source "$SHARED/venv/bin/activate" # CHANGE: pip install 'dataflow-rl[gpu]'; one environment for all

# Ray's ports require a token, which only the processes of this job have.
RAY_AUTH_TOKEN=$(openssl rand -hex 32)
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0
export HF_HOME=$SHARED/huggingface XDG_CACHE_HOME=$SHARED/cache
JUDGE_API_KEY=$(<"$SHARED/judge_api_key") # CHANGE: a file with the key, which only you can read
export JUDGE_API_KEY

HEAD=$(hostname --ip-address | awk '{print $1}') # this script runs on the first machine
PORT=$((20000 + SLURM_JOB_ID % 20000))           # the jobs of a shared machine have different ones
export TRAINERS HEAD PORT

srun --overlap bash -c '
  role=rollout
  if ((SLURM_NODEID < TRAINERS)); then role=trainer; fi
  if ((SLURM_NODEID == 0)); then
    exec ray start --block --head --node-ip-address="$HEAD" --port="$PORT" --labels="role=$role" --include-dashboard=false
  fi
  until timeout 1 bash -c "</dev/tcp/$HEAD/$PORT"; do sleep 1; done 2>/dev/null
  exec ray start --block --address="$HEAD:$PORT" --labels="role=$role"
' &
cluster=$!
trap 'kill "$cluster" 2>/dev/null || true' EXIT
until timeout 1 bash -c "</dev/tcp/$HEAD/$PORT"; do sleep 1; done 2>/dev/null

# The run waits for the machines that are not up yet (ray.start_timeout).
# CHANGE: the pipeline, the model, the problems, and your judge. Without data.* the run makes up problems, and without
# judge.url a stand-in scores them. The sizes below are those of machines with 8 GPUs.
dataflow run "$SHARED/code/pipelines/gsm8k_grpo.py" \
  runs="$SHARED/runs" name=gsm8k-grpo resume=auto \
  model.path="$SHARED/models/Qwen2.5-7B-Instruct" \
  data.train="$SHARED/data/gsm8k/train.jsonl" data.val="$SHARED/data/gsm8k/test.jsonl" data.prompts=1024 \
  trainer.lr=1e-6 engine.max_tokens=1024 checkpoint.grace_s=150 \
  judge.url=https://judge.example.com/v1 judge.model=MODEL judge.api_key_env=JUDGE_API_KEY \
  ray.address="$HEAD:$PORT" ray.gpus_per_worker=1 placement=disaggregated \
  trainer.world_size=$((8 * TRAINERS)) engine.rollout=vllm engine.tensor_parallel=2 \
  engine.replicas=$((4 * (SLURM_JOB_NUM_NODES - TRAINERS))) \
  ray.nodes.trainer.labels.role=trainer ray.nodes.rollout.labels.role=rollout &
run=$!

# Three minutes before the end Slurm sends SIGTERM: the run saves a checkpoint, from which the next job resumes it.
trap 'kill -TERM "$run" 2>/dev/null || true' TERM
code=0
wait "$run" || code=$?
if kill -0 "$run" 2>/dev/null; then # the signal has interrupted the wait
  code=0
  wait "$run" || code=$?
fi
exit "$code"
