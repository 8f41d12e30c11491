"""verl's options of data, algorithm and policy, one by one."""

from __future__ import annotations

from megagrpo.importing.rows import (
    OFF,
    Missing,
    Nothing,
    Row,
    Table,
    Together,
    Write,
    always,
    chosen,
    missing,
    number,
    text,
    texts,
    to,
    together,
    truth,
    whole,
)
from megagrpo.importing.verl.several import (
    ACTOR,
    MULTI_TURN,
    PACKED,
    WITH_IMAGES,
    adaptive,
    betas,
    bypassed,
    clip,
    clip_grad,
    discount,
    dual_clip,
    horizon,
    importance,
    in_loss,
    is_megatron,
    kl_in_reward,
    kl_part,
    least,
    least_rate,
    loss,
    loss_mode,
    minibatches,
    of_loss,
    offloaded,
    overlong_prompts,
    responses_of_microbatch,
    rounds,
    std,
    tokens_of_microbatch,
    train_files,
    ulysses,
    val_files,
    warmup_share,
)

DATA: Table = {
    "data.train_files": Row(train_files, "data.train", said="a list is a mixture"),
    "data.val_files": Row(val_files, "eval.sets", said="each file is a set of its own, named after it"),
    "data.train_batch_size": to("rollout.prompts_per_step", whole, 1024, "prompts in both"),
    "data.max_prompt_length": to("data.prompt_tokens_max", whole, 512),
    "data.max_response_length": to("rollout.response_tokens_max", whole, 512),
    "data.filter_overlong_prompts": Row(
        lambda value, _: Write({"data.overlong_prompts": "drop"}) if truth(value) else Nothing("see data.truncation"),
        "data.overlong_prompts",
        False,
        "longer prompts are left out here by default",
    ),
    "data.truncation": Row(overlong_prompts, "data.overlong_prompts", "error"),
    "data.prompt_key": together("data.train.0.columns.prompt", "prompt"),
    "data.reward_fn_key": together("data.train.0.columns.data_source", "data_source"),
    "data.train_max_samples": together(
        "data.train.0.amount",
        -1,
        "the first rows there, chosen ones here",
    ),
    "data.val_max_samples": together("eval.sets.NAME.files.0.amount", -1),
    "data.shuffle": to("data.shuffle", truth, True),
    "data.seed": to("seed", whole, said="one seed for all", off=(None,)),
    "data.apply_chat_template_kwargs": to("data.chat_template_arguments", lambda value: value, off=({}, None)),
    "data.apply_chat_template_kwargs.*": to("data.chat_template_arguments.*", lambda value: value),
    "data.val_batch_size": always("all held-out prompts are given to the engines at once"),
    "data.return_raw_chat": always("prompts are kept as messages"),
    "data.return_raw_input_ids": always("prompts are kept as messages and tokens"),
    "data.return_full_prompt": always("prompts are kept as messages and tokens"),
    "data.dataloader_num_workers": always("rows are read once, and kept"),
    "data.filter_overlong_prompts_workers": always("rows are read once, and kept"),
    "data.validation_shuffle": always("the order of held-out prompts has no effect"),
    "data.trust_remote_code": missing("code of models and data sets is never run"),
    "data.use_shm": missing("files are read where they lie"),
    "data.tokenizer": to("model.tokenizer", text, off=(None,)),
    "data.gen_batch_size": missing("rollout.dynamic_sampling samples as many as it needs"),
    "data.tool_config_path": missing(MULTI_TURN),
    "data.custom_cls.*": missing("rows come from files: see docs/data.md for columns, prepare what they lack before"),
    "data.sampler.*": missing("prompts are shuffled, or in order; data.no_resampling_pass_rate sets solved ones aside"),
    "data.datagen.*": missing("rows come from files, or from tasks of reasoning-gym"),
    "data.image_key": missing(WITH_IMAGES, (*OFF, "images")),
    "data.video_key": missing(WITH_IMAGES, (*OFF, "videos")),
    "data.image_patch_size": always("models here read text only"),
    "data.return_multi_modal_inputs": always("models here read text only"),
}

ALGORITHM: Table = {
    "algorithm.adv_estimator": chosen(
        "algorithm.advantage.name",
        {
            "grpo": "grpo",
            "grpo_vectorized": "grpo",
            "rloo": "rloo",
            "rloo_vectorized": "rloo",
            "opo": "opo",
            "gpg": "gpg",
            "grpo_passk": "pass_k",
            "gdpo": "gdpo",
            "remax": "remax",
            "gae": "gae",
            "reinforce_plus_plus": "reinforce_plus_plus",
            "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
        },
        "advantages here are listed in docs/algorithms.md; one of your own is algorithm.advantage: FILE.py:FUNCTION",
        "gae",
        "verl's default is gae, with a critic; here it is grpo",
    ),
    "algorithm.norm_adv_by_std_in_grpo": Row(
        std, "algorithm.advantage.standard_deviation", True, "sample (n - 1) in both"
    ),
    "algorithm.gamma": discount("algorithm.advantage.discount"),
    "algorithm.lam": discount("algorithm.advantage.trace"),
    "algorithm.use_kl_in_reward": Row(kl_in_reward, "algorithm.kl.placement", False),
    "algorithm.kl_penalty": kl_part("reward", "algorithm.kl.estimator", "kl"),
    "algorithm.kl_ctrl.kl_coef": kl_part("reward", "algorithm.kl.coefficient", 0.001),
    "algorithm.kl_ctrl.type": Row(
        lambda value, _: Together() if value in ("fixed", "adaptive") else Missing("fixed or adaptive"),
        "algorithm.kl.target",
        "fixed",
    ),
    "algorithm.kl_ctrl.target_kl": Row(adaptive, "algorithm.kl.target", 0.1),
    "algorithm.kl_ctrl.horizon": Row(horizon, "algorithm.kl.horizon", 10000),
    "algorithm.use_pf_ppo": missing("no reweighting of samples"),
    "algorithm.pf_ppo.*": always("use_pf_ppo counts"),
    "algorithm.rollout_correction.rollout_is": Row(importance, "algorithm.correction.weights"),
    "algorithm.rollout_correction.rollout_is_threshold": together("algorithm.correction.weights.high", 2.0),
    "algorithm.rollout_correction.rollout_is_batch_normalize": missing(
        "write algorithm.correction.weights.normalize: true"
    ),
    "algorithm.rollout_correction.rollout_rs": missing(
        "write algorithm.correction.reject: bounds by token or response"
    ),
    "algorithm.rollout_correction.rollout_rs_threshold": always("rollout_rs counts"),
    "algorithm.rollout_correction.bypass_mode": Row(
        lambda value, options: (
            Nothing("this loss has no ratio")
            if loss(options) == "gpg"
            else Write({"algorithm.rollout_logprobs_as_old": truth(value)})
        ),
        "algorithm.rollout_logprobs_as_old",
        said="ratios to the engines' logprobs",
    ),
    "algorithm.rollout_correction.loss_type": Row(bypassed, "algorithm.loss.name", said="with bypass_mode"),
    "algorithm.filter_groups.enable": Row(rounds, "rollout.dynamic_sampling"),
    "algorithm.filter_groups.max_num_gen_batches": Row(
        rounds, "rollout.dynamic_sampling.rounds_max", 0, said="0 there is no end"
    ),
    "algorithm.filter_groups.metric": always("groups without any difference in scores are replaced"),
}

POLICY: Table = {
    f"{ACTOR}.ppo_mini_batch_size": Row(
        minibatches,
        "algorithm.minibatches",
        256,
        "prompts of a minibatch there, their number here: train_batch_size / it",
    ),
    f"{ACTOR}.ppo_epochs": to("algorithm.epochs", whole, 1),
    f"{ACTOR}.policy_loss.loss_mode": Row(loss_mode, "algorithm.loss.name", "vanilla"),
    f"{ACTOR}.clip_ratio": Row(
        lambda value, options: Nothing("clip_ratio_low and clip_ratio_high count, unless they are null"),
        "algorithm.loss",
        0.2,
        "without effect where clip_ratio_low and clip_ratio_high have values, as by default",
    ),
    f"{ACTOR}.clip_ratio_low": clip("low", "algorithm.loss.clip_low"),
    f"{ACTOR}.clip_ratio_high": clip("high", "algorithm.loss.clip_high"),
    f"{ACTOR}.clip_ratio_c": Row(dual_clip, "algorithm.loss.dual_clip", 3.0, "on there; off here unless given"),
    f"{ACTOR}.tau_pos": of_loss("sapo", "algorithm.loss.temperature_positive", 1.0),
    f"{ACTOR}.tau_neg": of_loss("sapo", "algorithm.loss.temperature_negative", 1.05),
    f"{ACTOR}.policy_loss.clip_cov_ratio": of_loss("clip_cov", "algorithm.loss.covariance_share", 0.0002),
    f"{ACTOR}.policy_loss.clip_cov_lb": of_loss("clip_cov", "algorithm.loss.covariance_low", 1.0),
    f"{ACTOR}.policy_loss.clip_cov_ub": of_loss("clip_cov", "algorithm.loss.covariance_high", 5.0),
    f"{ACTOR}.policy_loss.kl_cov_ratio": of_loss("kl_cov", "algorithm.loss.covariance_share", 0.0002),
    f"{ACTOR}.policy_loss.ppo_kl_coef": of_loss("kl_cov", "algorithm.loss.covariance_kl", 0.1),
    f"{ACTOR}.loss_agg_mode": chosen(
        "algorithm.aggregation.name",
        {
            "token-mean": "token_mean",
            "token-sum": "token_sum",
            "seq-mean-token-sum": "seq_mean_token_sum",
            "seq-mean-token-mean": "seq_mean_token_mean",
            "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
        },
        "aggregations here are token_mean, token_sum and seq_mean_...",
        "token-mean",
    ),
    f"{ACTOR}.loss_scale_factor": Row(
        lambda value, options: (
            Write({"algorithm.aggregation.divisor": number(value)})
            if value is not None and options[f"{ACTOR}.loss_agg_mode"] == "seq-mean-token-sum-norm"
            else Nothing("the longest response divides, as here")
        ),
        "algorithm.aggregation.divisor",
    ),
    f"{ACTOR}.entropy_coeff": to("algorithm.entropy_coefficient", number, 0),
    f"{ACTOR}.calculate_entropy": always("the entropy is reported, unless algorithm.entropy_metric is false"),
    f"{ACTOR}.use_kl_loss": Row(
        lambda value, options: (
            Write({"algorithm.kl.placement": "loss"}) if in_loss(options) else Nothing("no penalty in the loss")
        ),
        "algorithm.kl.placement",
        False,
    ),
    f"{ACTOR}.kl_loss_coef": kl_part("loss", "algorithm.kl.coefficient", 0.001),
    f"{ACTOR}.kl_loss_type": kl_part("loss", "algorithm.kl.estimator", "low_var_kl"),
    f"{ACTOR}.grad_clip": Row(clip_grad, "train.optimizer.clip_grad", 1.0),
    f"{ACTOR}.shuffle": missing("minibatches are made in the order of the samples"),
    f"{ACTOR}.data_loader_seed": always("minibatches are made in the order of the samples"),
    f"{ACTOR}.use_dynamic_bsz": always("microbatches are packed by tokens"),
    f"{ACTOR}.ppo_max_token_len_per_gpu": Row(tokens_of_microbatch, "train.tokens_per_microbatch", 16384),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": Row(
        lambda value, options: responses_of_microbatch(value, options) if value is not None else Nothing("not set"),
        "train.tokens_per_microbatch",
        said="responses there, tokens here; results do not depend on it",
    ),
    f"{ACTOR}.ppo_micro_batch_size": missing(
        "deprecated there; train.tokens_per_microbatch counts tokens on each rank"
    ),
    f"{ACTOR}.ulysses_sequence_parallel_size": Row(ulysses, "train.layout.context", 1, "context ranks, in a ring"),
    f"{ACTOR}.strategy": Row(
        lambda value, options: (
            Nothing("Megatron, as here")
            if is_megatron(options)
            else Missing("Megatron-Core trains here: look at train.layout, or let `megagrpo plan --search` find one")
        ),
        "train.layout",
    ),
    f"{ACTOR}.rollout_n": always("rollout.samples_per_prompt says it once"),
    f"{ACTOR}.use_remove_padding": always(PACKED),
    f"{ACTOR}.use_torch_compile": missing("kernels are Megatron's and Transformer Engine's", (*OFF, True)),
    f"{ACTOR}.use_fused_kernels": always("logprobs are computed from hidden states without whole logits"),
    f"{ACTOR}.entropy_checkpointing": always("the entropy is computed without whole logits"),
    f"{ACTOR}.entropy_from_logits_with_chunking": always("the entropy is computed without whole logits"),
    f"{ACTOR}.router_replay.*": missing("routes of experts are not replayed; look at docs/mismatch.md"),
    f"{ACTOR}.freeze_vision_tower": missing(WITH_IMAGES),
    f"{ACTOR}.checkpoint.save_contents": Row(
        lambda value, _: (
            Nothing("weights, optimizer and generators are saved; a Hugging Face model at the end")
            if "optimizer" in texts(value)
            else Missing("checkpoints are whole here, so that a run can continue")
        ),
        "checkpoint",
    ),
    f"{ACTOR}.checkpoint.load_contents": always("all that was saved is loaded"),
    f"{ACTOR}.checkpoint.async_save": always("training waits for a copy in memory; files are written meanwhile"),
    f"{ACTOR}.load_weight": always("weights are loaded from model.path"),
    f"{ACTOR}.nccl_timeout": always("cluster.step_timeout_seconds limits each phase"),
    f"{ACTOR}.calculate_sum_pi_squared": missing("for advantages that are not here"),
    f"{ACTOR}.sum_pi_squared_checkpointing": always("for advantages that are not here"),
    f"{ACTOR}.use_prefix_grouper": missing("responses are packed with their own prompts"),
    f"{ACTOR}.profiler.*": missing("train.profile writes traces of chosen steps"),
    f"{ACTOR}.optim.lr": to("train.optimizer.lr", number, 1e-6),
    f"{ACTOR}.optim.weight_decay": to(
        "train.optimizer.weight_decay", number, 0.01, "0 here unless given; of matrices only"
    ),
    f"{ACTOR}.optim.betas": Row(betas, "train.optimizer.beta2", [0.9, 0.999], "0.95 here unless given"),
    f"{ACTOR}.optim.clip_grad": to("train.optimizer.clip_grad", number),
    f"{ACTOR}.optim.lr_warmup_steps": to("train.optimizer.warmup_steps", whole, -1, off=(None, -1)),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": Row(
        warmup_share, "train.optimizer.warmup_steps", 0.0, "a share of all steps there, steps here"
    ),
    f"{ACTOR}.optim.lr_scheduler_type": chosen(
        "train.optimizer.schedule",
        {"constant": "constant", "cosine": "cosine", "linear": "linear", None: {}},
        "constant, linear or cosine",
        said="constant there unless given; cosine with VeOmni, linear with torchtitan",
    ),
    f"{ACTOR}.optim.decay_type": chosen(
        "train.optimizer.schedule", {"cosine": "cosine", "linear": "linear"}, "constant, linear or cosine"
    ),
    f"{ACTOR}.optim.warmup_style": chosen(
        "train.optimizer.schedule", {"constant": "constant", "cosine": "cosine", None: {}}, "constant, linear or cosine"
    ),
    f"{ACTOR}.optim.lr_decay_style": chosen(
        "train.optimizer.schedule",
        {"constant": "constant", "cosine": "cosine", "linear": "linear"},
        "constant, linear or cosine",
    ),
    f"{ACTOR}.optim.min_lr_ratio": Row(least_rate, "train.optimizer.min_lr", 0.0, "a share of lr there"),
    f"{ACTOR}.optim.min_lr_factor": Row(least_rate, "train.optimizer.min_lr", said="a share of lr there"),
    f"{ACTOR}.optim.min_lr": Row(least, "train.optimizer.min_lr"),
    f"{ACTOR}.optim.lr_min": Row(least, "train.optimizer.min_lr"),
    f"{ACTOR}.optim.lr_start": missing("warm-ups begin at 0"),
    f"{ACTOR}.optim.lr_decay_ratio": missing("over the whole run", (*OFF, 1.0)),
    f"{ACTOR}.optim.total_training_steps": always("train.total_steps says it once"),
    f"{ACTOR}.optim.optimizer": missing("Adam with decoupled weight decay", (*OFF, "AdamW", "adam")),
    f"{ACTOR}.optim.optimizer_impl": missing("Adam with decoupled weight decay", (*OFF, "torch.optim")),
    f"{ACTOR}.optim.num_cycles": missing("half a cosine", (*OFF, 0.5)),
    f"{ACTOR}.optim.lr_warmup_init": missing("from 0", (*OFF, 0.0)),
    f"{ACTOR}.optim.lr_decay_steps": missing("over the whole run"),
    f"{ACTOR}.optim.weight_decay_incr_style": missing("constant", (*OFF, "constant")),
    f"{ACTOR}.optim.lr_wsd_decay_style": always("there is no such schedule"),
    f"{ACTOR}.optim.lr_wsd_decay_steps": missing("constant, linear or cosine"),
    f"{ACTOR}.optim.use_checkpoint_opt_param_scheduler": always("the schedule is made from the recipe"),
    f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload": offloaded("optimizer"),
    f"{ACTOR}.optim.override_optimizer_config.optimizer_offload_fraction": missing(
        "the optimizer is moved to host memory whole, while engines sample: train.offload"
    ),
    f"{ACTOR}.optim.override_optimizer_config.*": missing(
        "see train.optimizer, train.overlap and train.gradient_dtype"
    ),
    f"{ACTOR}.optim.override_optimizer_config": missing("see train.optimizer"),
    f"{ACTOR}.fsdp_config.param_offload": offloaded("parameters"),
    f"{ACTOR}.fsdp_config.optimizer_offload": offloaded("optimizer"),
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": Row(ulysses, "train.layout.context", 1),
    f"{ACTOR}.veomni.param_offload": offloaded("parameters"),
    f"{ACTOR}.veomni.optimizer_offload": offloaded("optimizer"),
    f"{ACTOR}.veomni.ulysses_parallel_size": Row(ulysses, "train.layout.context", 1),
    f"{ACTOR}.veomni.*": always("of VeOmni: Megatron-Core trains here"),
    f"{ACTOR}.torchtitan.param_offload": offloaded("parameters"),
    f"{ACTOR}.torchtitan.optimizer_offload": offloaded("optimizer"),
    f"{ACTOR}.torchtitan.tensor_parallel_size": to("train.layout.tensor", whole, 1),
    f"{ACTOR}.torchtitan.pipeline_parallel_size": to("train.layout.pipeline", whole, 1),
    f"{ACTOR}.torchtitan.context_parallel_size": Row(ulysses, "train.layout.context", 1),
    f"{ACTOR}.torchtitan.*": always("of torchtitan: Megatron-Core trains here"),
    f"{ACTOR}.fsdp_config.*": always("of FSDP: Megatron-Core trains here"),
}
