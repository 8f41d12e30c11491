"""In the form of TRL's scripts."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def reward(completions, **columns):
    return [float(len(set(text))) for text in completions]


training_args = GRPOConfig(
    output_dir="runs",
    run_name="qwen2.5-0.5b",
    learning_rate=2e-6,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=4,
    num_generations=8,
    max_completion_length=256,
    num_iterations=1,
    beta=0.01,
    epsilon=0.2,
    epsilon_high=0.28,
    loss_type="dr_grpo",
    scale_rewards=False,
    mask_truncated_completions=True,
    use_vllm=True,
    vllm_mode="colocate",
    vllm_gpu_memory_utilization=0.3,
    max_steps=500,
    warmup_ratio=0.1,
    save_steps=100,
    bf16=True,
    logging_steps=10,
    report_to="wandb",
)

trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=reward,
    args=training_args,
    train_dataset=load_dataset("trl-lib/tldr", split="train"),
)
trainer.train()
