#!/bin/bash
# In the form of slime's scripts: arrays of arguments, then `ray job submit`.
NUM_GPUS=${NUM_GPUS:-8}
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/qwen3-8B.sh"

CKPT_ARGS=(
   --hf-checkpoint Qwen/Qwen3-8B
   #--hf-checkpoint Qwen/Qwen3-8B-FP8
   --ref-load models/Qwen3-8B_torch_dist
   --save models/Qwen3-8B_slime/
   --save-interval 20
)

ROLLOUT_ARGS=(
   --prompt-data data/dapo-math-17k.jsonl
   --input-key question
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-temperature 1

   --global-batch-size 256
   --balance-data
)

GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.00
   --kl-loss-type low_var_kl
   --eps-clip 0.2
   --eps-clip-high 0.28
   --use-tis
)

RUNTIME_ENV_JSON="{
  \"env_vars\": {\"CUDA_DEVICE_MAX_CONNECTIONS\": \"1\"}
}"

ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="${RUNTIME_ENV_JSON}" \
   -- python3 train.py \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node ${NUM_GPUS} \
   --colocate \
   ${MODEL_ARGS[@]} \
   ${CKPT_ARGS[@]} \
   ${ROLLOUT_ARGS[@]} \
   ${GRPO_ARGS[@]} \
   --eval-interval 20 \
   --eval-prompt-data aime data/aime-2024.jsonl \
   --n-samples-per-eval-prompt 16 \
   --eval-max-response-len 16384 \
   --tensor-model-parallel-size 2 \
   --sequence-parallel \
   --recompute-granularity full \
   --recompute-method uniform \
   --recompute-num-layers 1 \
   --use-dynamic-batch-size \
   --max-tokens-per-gpu 9216 \
   --optimizer adam \
   --lr 1e-6 \
   --lr-decay-style constant \
   --weight-decay 0.1 \
   --adam-beta1 0.9 \
   --adam-beta2 0.98 \
   --rollout-num-gpus-per-engine 2 \
   --sglang-mem-fraction-static 0.7 \
   --attention-backend flash
