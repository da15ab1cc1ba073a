#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --requeue
# One torchrun a node; SLURM starts the job again when a node fails (--requeue), and it goes on from the last checkpoint.
#
#     trainwright plan train.py:build --hardware 2x8xh100 -o plan.json
#     sbatch --export=ALL,MODEL=train.py:build,PLAN=plan.json,RUN=/shared/runs/a examples/slurm.sh
#
# RUN is a directory that all nodes see; PROCESSES a node and PORT may be set too.
set -euo pipefail

model=${MODEL:?a model is needed, such as train.py:build}
plan=${PLAN:?a plan is needed, from trainwright plan -o}
run=${RUN:?a directory for the run is needed, which all nodes see}
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

resume=()
if compgen -G "$run/step-*" > /dev/null; then resume=(--resume); fi

srun torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node "${PROCESSES:-8}" --max-restarts 3 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head_node:${PORT:-29500}" \
    -m trainwright train "$model" --plan "$plan" --steps "${STEPS:-100000}" \
    --checkpoint "$run" --checkpoint-every "${EVERY:-500}" --metrics "$run.jsonl" "${resume[@]}"
