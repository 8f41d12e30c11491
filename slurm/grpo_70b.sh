#!/usr/bin/env bash
# GRPO of Llama-3.1-70B on 16 nodes of 8 GPUs:  sbatch slurm/grpo_70b.sh [KEY=VALUE ...]
# Three lines are yours to edit: the one below, and two further down. docs/slurm.md explains them.
#SBATCH --partition=YOUR_PARTITION --account=YOUR_ACCOUNT  # EDIT 1: where your jobs go
#SBATCH --nodes=16 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0 --time=24:00:00
#SBATCH --job-name=grpo_70b --output=%x-%j.out --open-mode=append
# Half an hour before the time limit the run ends its step and saves; the job then goes back to the queue.
#SBATCH --signal=B:USR1@1800 --requeue
set -euo pipefail

cd /shared/megagrpo         # EDIT 2: the checkout, where all nodes see it; relative paths in recipes start here
source .venv/bin/activate   # EDIT 3: the environment; or CONTAINER=(--container-image=... --container-mounts=...)

source slurm/ray_cluster.sh
run_recipe yaml_recipes/grpo_70b.yaml "$@"
