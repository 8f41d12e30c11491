#!/bin/bash
# In the form of open-instruct's scripts: a launcher, then grpo_fast.py on a node of learners and one of engines.
EXP_NAME="qwen3_8b_math"
DATASETS="my-org/math-prompts 1.0 my-org/gsm8k-prompts 2000"
BEAKER_IMAGE="${1:-image}"
if [[ "$1" == "mine"* ]]; then
    BEAKER_IMAGE="$1"
fi

uv run mason.py \
    --task_name ${EXP_NAME} \
    --image ${BEAKER_IMAGE} \
    --num_nodes 2 \
    --gpus 8 \
    --env VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 \
    -- source configs/ray_node_setup.sh \
\&\& uv run open_instruct/grpo_fast.py \
    --exp_name ${EXP_NAME} \
    --model_name_or_path Qwen/Qwen3-8B \
    --chat_template_name olmo_thinker_rlzero \
    --dataset_mixer_list $DATASETS \
    --dataset_mixer_list_splits train \
    --dataset_mixer_eval_list my-org/math-held-out 64 \
    --dataset_mixer_eval_list_splits train \
    --max_prompt_token_length 2048 \
    --response_length 8192 \
    --pack_length 10240 \
    --num_unique_prompts_rollout 64 \
    --num_samples_per_prompt_rollout 8 \
    --num_mini_batches 2 \
    --total_episodes 256_000 \
    --beta 0.01 \
    --kl_estimator 2 \
    --clip_higher 0.28 \
    --async_steps 4 \
    --inflight_updates True \
    --active_sampling \
    --advantage_normalization_type standard \
    --mask_truncated_completions True \
    --rho_mask_lower_bound 0.5 \
    --rho_mask_upper_bound 5.0 \
    --no_resampling_pass_rate 0.875 \
    --non_stop_penalty False \
    --apply_verifiable_reward true \
    --verification_reward 1.0 \
    --stop_strings "</answer>" \
    --temperature 1.0 \
    --learning_rate 1e-6 \
    --lr_scheduler_type constant \
    --warmup_ratio 0.1 \
    --deepspeed_stage 3 \
    --num_learners_per_node 8 \
    --vllm_num_engines 4 \
    --vllm_tensor_parallel_size 2 \
    --vllm_enable_prefix_caching \
    --no_filter_zero_std_samples \
    --gradient_checkpointing \
    --seed 1 \
    --local_eval_every 25 \
    --eval_on_step_0 True \
    --save_freq 100 \
    --checkpoint_state_freq 50 \
    --oe_eval_tasks "aime:zs_cot,math" \
    --with_tracking "$@"
