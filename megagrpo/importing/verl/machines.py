"""verl's options of models, ranks, engines, rewards and the run, one by one."""

from __future__ import annotations

from megagrpo.importing.rows import (
    ABSENT,
    OFF,
    Missing,
    Nothing,
    Row,
    Table,
    Write,
    always,
    chosen,
    missing,
    number,
    text,
    to,
    together,
    truth,
    whole,
)
from megagrpo.importing.values import kept, run_name
from megagrpo.importing.verl.several import (
    MEGATRON,
    MULTI_TURN,
    PACKED,
    ROLLOUT,
    TRANSFORMER,
    VLLM,
    checkpointing,
    engine,
    evaluated_each,
    length,
    length_in_penalty,
    loggers,
    logprob_tokens,
    lora_alpha,
    lora_rank,
    lora_targets,
    memory_share,
    nodes,
    of_critic,
    offloaded,
    overlong,
    own_file,
    recompute,
    reward_file,
    sampled,
    saved_each,
)

MEGATRON_ROWS: Table = {
    f"{MEGATRON}.tensor_model_parallel_size": to("train.layout.tensor", whole, 1),
    f"{MEGATRON}.pipeline_model_parallel_size": to("train.layout.pipeline", whole, 1),
    f"{MEGATRON}.virtual_pipeline_model_parallel_size": to("train.layout.virtual_pipeline", whole, off=(None,)),
    f"{MEGATRON}.context_parallel_size": to("train.layout.context", whole, 1),
    f"{MEGATRON}.expert_model_parallel_size": to("train.layout.expert", whole, 1),
    f"{MEGATRON}.expert_tensor_parallel_size": to("train.layout.expert_tensor", whole, off=(None,)),
    f"{MEGATRON}.sequence_parallel": always("comes with tensor ranks"),
    f"{MEGATRON}.use_distributed_optimizer": to("train.distributed_optimizer", truth, True),
    f"{MEGATRON}.param_offload": offloaded("parameters"),
    f"{MEGATRON}.grad_offload": offloaded("gradients"),
    f"{MEGATRON}.optimizer_offload": offloaded("optimizer"),
    f"{MEGATRON}.seed": always("seed at the top says it once"),
    f"{MEGATRON}.dtype": chosen(
        "model.dtype", {"bfloat16": {}, "float32": "float32", "fp32": "float32"}, "bfloat16 or float32"
    ),
    f"{MEGATRON}.use_remove_padding": always(PACKED),
    f"{MEGATRON}.use_mbridge": always("Hugging Face files are read by every rank, without a conversion"),
    f"{MEGATRON}.vanilla_mbridge": always("Hugging Face files are read by every rank, without a conversion"),
    f"{MEGATRON}.use_dist_checkpointing": missing(
        "give a Hugging Face directory; `megagrpo convert megatron-to-hf` makes one"
    ),
    f"{MEGATRON}.dist_checkpointing_path": missing("give a Hugging Face directory in model.path"),
    f"{MEGATRON}.dist_checkpointing_prefix": missing("give a Hugging Face directory in model.path"),
    f"{MEGATRON}.forward_only": always("the actor trains"),
    f"{MEGATRON}.override_ddp_config": missing("see train.overlap and train.gradient_dtype"),
    f"{MEGATRON}.override_ddp_config.*": missing("see train.overlap and train.gradient_dtype"),
    f"{MEGATRON}.override_mcore_model_config": missing("give fields of TransformerConfig in train.megatron"),
    f"{TRANSFORMER}.recompute_granularity": Row(recompute, "train.recompute"),
    f"{TRANSFORMER}.recompute_modules": always("recompute_granularity counts"),
    f"{TRANSFORMER}.recompute_method": always("recompute_granularity counts"),
    f"{TRANSFORMER}.recompute_num_layers": always("recompute_granularity counts"),
    f"{TRANSFORMER}.attention_backend": always("Transformer Engine chooses; layer_spec says which layers"),
    f"{TRANSFORMER}.num_layers_in_first_pipeline_stage": to("train.layout.first_stage_layers", whole, off=(None,)),
    f"{TRANSFORMER}.num_layers_in_last_pipeline_stage": to("train.layout.last_stage_layers", whole, off=(None,)),
    f"{TRANSFORMER}.account_for_embedding_in_pipeline_split": missing("give first_stage_layers or last_stage_layers"),
    f"{TRANSFORMER}.account_for_loss_in_pipeline_split": missing("give first_stage_layers or last_stage_layers"),
    f"{TRANSFORMER}.*": Row(
        lambda value, _: Nothing("not set") if value is None else Write({"train.megatron.*": value}),
        "train.megatron",
        said="`megagrpo plan` says which of them it sets itself",
    ),
}

ROLLOUT_ROWS: Table = {
    f"{ROLLOUT}.name": Row(engine, "rollout.engine", said="engines are SGLang's"),
    f"{ROLLOUT}.n": to("rollout.samples_per_prompt", whole, 1),
    f"{ROLLOUT}.temperature": to("rollout.temperature", number, 1.0, "divides the logits in training, too, in both"),
    f"{ROLLOUT}.top_p": to(
        "rollout.top_p", number, 1.0, "1 in training: the trainer does not renormalise over a nucleus"
    ),
    f"{ROLLOUT}.top_k": to("rollout.top_k", lambda value: max(0, whole(value)), -1, "0 for all; 0 in training"),
    f"{ROLLOUT}.tensor_model_parallel_size": to("rollout.layout.tensor", whole, 2),
    f"{ROLLOUT}.expert_parallel_size": to("rollout.layout.expert", whole, 1),
    f"{ROLLOUT}.pipeline_model_parallel_size": to("rollout.layout.pipeline", whole, 1),
    f"{ROLLOUT}.data_parallel_size": missing("rollout.engines are more engines", (*OFF, 1)),
    f"{ROLLOUT}.gpu_memory_utilization": Row(memory_share, "rollout.sglang.mem_fraction_static", 0.5),
    f"{ROLLOUT}.max_num_seqs": to("rollout.requests_at_once", whole, 256),
    f"{ROLLOUT}.max_num_batched_tokens": always("SGLang splits long prompts by itself: chunked_prefill_size"),
    f"{ROLLOUT}.max_model_len": always("prompt and response limits say it"),
    f"{ROLLOUT}.prompt_length": always("data.prompt_tokens_max says it once"),
    f"{ROLLOUT}.response_length": always("rollout.response_tokens_max says it once"),
    f"{ROLLOUT}.mode": always("engines are servers"),
    f"{ROLLOUT}.dtype": missing("engines have the policy's dtype", (*OFF, "bfloat16")),
    f"{ROLLOUT}.ignore_eos": missing("a response ends at its end-of-sequence token"),
    f"{ROLLOUT}.do_sample": missing("training samples", (*OFF, True)),
    f"{ROLLOUT}.enforce_eager": Row(
        lambda value, _: (
            Write({"rollout.sglang.disable_cuda_graph": True}) if truth(value) else Nothing("graphs, as here")
        ),
        "rollout.sglang.disable_cuda_graph",
    ),
    f"{ROLLOUT}.free_cache_engine": always("engines give their memory back while the ranks train"),
    f"{ROLLOUT}.enable_chunked_prefill": always("SGLang's own"),
    f"{ROLLOUT}.enable_prefix_caching": always("SGLang's own"),
    f"{ROLLOUT}.cudagraph_capture_sizes": missing(VLLM),
    f"{ROLLOUT}.load_format": always("weights come from the training ranks"),
    f"{ROLLOUT}.layered_summon": always("weights are sent piece by piece"),
    f"{ROLLOUT}.disable_log_stats": always("engines write their own logs"),
    f"{ROLLOUT}.skip_tokenizer_init": always("tokens go in and come out"),
    f"{ROLLOUT}.calculate_log_probs": always("engines' logprobs are always kept and compared: docs/mismatch.md"),
    f"{ROLLOUT}.logprobs_mode": always("logprobs are of the distribution that is sampled"),
    f"{ROLLOUT}.scheduling_policy": missing(VLLM, (*OFF, "fcfs")),
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": Row(logprob_tokens, "train.logprob_tokens_per_microbatch"),
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": always(
        "passes without gradients take as many tokens as those with"
    ),
    f"{ROLLOUT}.log_prob_micro_batch_size": always("passes without gradients take as many tokens as those with"),
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": always("microbatches are packed by tokens"),
    f"{ROLLOUT}.over_sample_rate": missing("write `schedule: {kind: sync, oversample: PROMPTS}`, or carry_over"),
    f"{ROLLOUT}.multi_stage_wake_up": always("weights, then keys and values, come back in turn"),
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": to(
        "weights.bucket_bytes", lambda value: whole(value) * 2**20, said="megabytes there"
    ),
    f"{ROLLOUT}.checkpoint_engine.backend": missing("weights.transfer: auto chooses", (*OFF, "naive")),
    f"{ROLLOUT}.checkpoint_engine.engine_kwargs": missing("weights.transfer: auto chooses"),
    f"{ROLLOUT}.engine_kwargs.sglang.*": to("rollout.sglang.*", lambda value: value, off=(None,)),
    f"{ROLLOUT}.engine_kwargs.*": missing(VLLM),
    f"{ROLLOUT}.quantization": chosen("rollout.quantization", {"fp8": "fp8", None: {}}, "fp8 or null"),
    f"{ROLLOUT}.quantization_config_file": missing("blocks of 128 x 128"),
    f"{ROLLOUT}.enable_rollout_routing_replay": missing("routes of experts are not replayed; look at docs/mismatch.md"),
    f"{ROLLOUT}.multi_turn.enable": missing(MULTI_TURN),
    f"{ROLLOUT}.multi_turn.*": always("multi_turn.enable counts"),
    f"{ROLLOUT}.agent.default_agent_loop": missing(MULTI_TURN, (*OFF, "single_turn_agent")),
    f"{ROLLOUT}.agent.num_workers": always("agent.processes, with an agent"),
    f"{ROLLOUT}.agent.*": missing(MULTI_TURN),
    f"{ROLLOUT}.trace.*": always("track.mlflow.traces_per_step rollouts become MLflow traces"),
    f"{ROLLOUT}.profiler.*": missing("train.profile writes traces of chosen steps", (*OFF, "outputs/profile")),
    f"{ROLLOUT}.skip_rollout": missing(
        "checkpoint.keep_batches and `megagrpo train --train-only` train on saved samples"
    ),
    f"{ROLLOUT}.skip_dump_dir": always("skip_rollout counts"),
    f"{ROLLOUT}.prometheus.*": missing("track.prometheus_port serves the run's gauges", (*OFF, 9090)),
    f"{ROLLOUT}.mtp": missing("no speculative decoding"),
    f"{ROLLOUT}.layer_name_map.*": always("names of weights are known by family"),
    f"{ROLLOUT}.val_kwargs.n": sampled("eval.samples_per_prompt", whole, 1),
    f"{ROLLOUT}.val_kwargs.temperature": to("eval.temperature", number, 0),
    f"{ROLLOUT}.val_kwargs.top_p": sampled("eval.top_p", number, 1.0),
    f"{ROLLOUT}.val_kwargs.top_k": sampled("eval.top_k", lambda value: max(0, whole(value)), -1),
    f"{ROLLOUT}.val_kwargs.do_sample": Row(
        lambda value, options: (
            Nothing("val_kwargs.temperature counts, as there")
            if truth(value) or options.number(f"{ROLLOUT}.val_kwargs.temperature") == 0
            else Missing("engines sample at val_kwargs.temperature there; greedy is eval.temperature: 0")
        ),
        said="val_kwargs.temperature counts, as there",
    ),
}

ACTOR_MODEL = "actor_rollout_ref.model"
MODEL: Table = {
    f"{ACTOR_MODEL}.path": to("model.path", text, said="a Hugging Face directory or hub id in both"),
    f"{ACTOR_MODEL}.tokenizer_path": to("model.tokenizer", text, off=(None,)),
    f"{ACTOR_MODEL}.custom_chat_template": missing("write it to a file, and name that in model.chat_template"),
    f"{ACTOR_MODEL}.enable_gradient_checkpointing": Row(
        checkpointing, "train.recompute", True, "full, or parts of layers"
    ),
    f"{ACTOR_MODEL}.enable_activation_offload": missing(
        "train.recompute computes activations again in place of keeping them"
    ),
    f"{ACTOR_MODEL}.use_remove_padding": always(PACKED),
    f"{ACTOR_MODEL}.use_fused_kernels": always("logprobs are computed from hidden states without whole logits"),
    f"{ACTOR_MODEL}.fused_kernel_options.*": always("logprobs are computed from hidden states without whole logits"),
    f"{ACTOR_MODEL}.use_liger": missing("kernels are Megatron's and Transformer Engine's"),
    f"{ACTOR_MODEL}.use_shm": missing("files are read where they lie"),
    f"{ACTOR_MODEL}.trust_remote_code": missing(
        "code of models is never run: docs/families.md lists those that are known"
    ),
    f"{ACTOR_MODEL}.external_lib": missing("code of models is never run"),
    f"{ACTOR_MODEL}.hf_config_path": missing("config.json is read from model.path"),
    f"{ACTOR_MODEL}.torch_dtype": chosen("model.dtype", {"bfloat16": {}, "float32": "float32"}, "bfloat16 or float32"),
    f"{ACTOR_MODEL}.override_config": missing("config.json counts; change a copy of it"),
    f"{ACTOR_MODEL}.override_config.*": missing("config.json counts; change a copy of it"),
    f"{ACTOR_MODEL}.override_config.model_config": missing("config.json counts; change a copy of it"),
    f"{ACTOR_MODEL}.lora_rank": Row(lora_rank, "train.lora.rank"),
    f"{ACTOR_MODEL}.lora_alpha": Row(lora_alpha, "train.lora.alpha", 16),
    f"{ACTOR_MODEL}.target_modules": Row(lora_targets, "train.lora.targets", "all-linear"),
    f"{ACTOR_MODEL}.exclude_modules": missing("train.lora.targets names those that have an adapter"),
    f"{ACTOR_MODEL}.lora_adapter_path": missing("merge it before: `megagrpo convert merge-lora`"),
    f"{ACTOR_MODEL}.lora.rank": Row(lora_rank, "train.lora.rank"),
    f"{ACTOR_MODEL}.lora.alpha": Row(lora_alpha, "train.lora.alpha"),
    f"{ACTOR_MODEL}.lora.target_modules": Row(lora_targets, "train.lora.targets"),
    f"{ACTOR_MODEL}.lora.*": always("rank, alpha and target_modules count"),
    f"{ACTOR_MODEL}.tiled_mlp.*": missing("`train.recompute: {modules: [mlp]}` keeps less", (*OFF, 4)),
    f"{ACTOR_MODEL}.mtp.enable": missing("heads for further tokens are neither trained nor used"),
    f"{ACTOR_MODEL}.mtp.*": always("mtp.enable counts"),
    "actor_rollout_ref.hybrid_engine": missing("cluster.placement: disaggregated", (*OFF, True)),
    "actor_rollout_ref.nccl_timeout": always("cluster.step_timeout_seconds limits each phase"),
    "model_engine": Row(
        lambda value, _: (
            Nothing("Megatron trains, as here")
            if value == "megatron"
            else Missing("Megatron-Core trains here: look at train.layout")
        ),
        "train.layout",
    ),
}

REFERENCE: Table = {
    "actor_rollout_ref.ref.fsdp_config.param_offload": offloaded("reference"),
    "actor_rollout_ref.ref.megatron.param_offload": offloaded("reference"),
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": Row(logprob_tokens, "train.logprob_tokens_per_microbatch"),
    "actor_rollout_ref.ref.*": always("the reference policy has the layout and the kernels of the policy"),
}

REWARD: Table = {
    "custom_reward_function.path": Row(reward_file, "reward.functions", None, "compute_score works as it is"),
    "custom_reward_function.name": together("reward.functions", "compute_score"),
    "custom_reward_function.reward_kwargs.*": missing("give them in reward.functions.0.arguments"),
    "reward.custom_reward_function.path": Row(reward_file, "reward.functions"),
    "reward.custom_reward_function.name": together("reward.functions"),
    **{
        f"{prefix}.{name}": row
        for prefix in ("reward_model", "reward")
        for name, row in {
            "reward_kwargs.overlong_buffer_cfg.enable": together("reward.overlong"),
            "reward_kwargs.overlong_buffer_cfg.len": Row(
                overlong("reward.overlong.buffer_tokens", whole).answer, "reward.overlong.buffer_tokens"
            ),
            "reward_kwargs.overlong_buffer_cfg.penalty_factor": Row(
                overlong("reward.overlong.penalty", number).answer, "reward.overlong.penalty"
            ),
            "reward_kwargs.overlong_buffer_cfg.log": always("what each part of a score gives is always logged"),
            "reward_kwargs.max_resp_len": Row(
                length_in_penalty, said="rollout.response_tokens_max, below which the penalty begins"
            ),
            "reward_kwargs.*": missing("give arguments of functions in reward.functions"),
            "sandbox_fusion.url": missing("function: code has a sandbox of its own; function: remote asks a server"),
            "sandbox_fusion.*": always("sandbox_fusion.url counts"),
        }.items()
    },
    "reward_model.reward_manager": missing(
        "managers are gates and penalties of reward: see docs/rewards.md", (*OFF, "naive", "dapo", "batch", "prime")
    ),
    "reward.reward_manager.name": missing("see docs/rewards.md", (*OFF, "naive", "dapo")),
    "reward_manager.*": missing(
        "managers are gates and penalties of reward: see docs/rewards.md",
        (*OFF, "naive", "dapo", "register", "custom_reward_manager"),
    ),
    "reward_model.launch_reward_fn_async": always("rewards run in processes of their own"),
    "reward_model.use_reward_loop": always("rewards run in processes of their own"),
    "reward_model.num_workers": to("reward.workers", whole, said="2 here unless given; spread over the nodes"),
    "reward.num_workers": to("reward.workers", whole),
    "reward_model.enable": missing(
        "a model that scores is reward.models with function: reward_model, see docs/rewards.md"
    ),
    "reward_model.*": always("reward_model.enable counts"),
}

CRITIC: Table = {
    "critic.optim.lr": of_critic("algorithm.critic.lr", number, 1e-5),
    "critic.model.path": of_critic("algorithm.critic.path", text, ABSENT),
    "critic.cliprange_value": of_critic("algorithm.critic.value_clip", number, 0.5),
    "trainer.critic_warmup": of_critic("algorithm.critic.warmup_steps", whole, 0),
    "critic.*": always("the critic is trained as the policy is, on the same ranks"),
}

TRAINER: Table = {
    "trainer.experiment_name": to("name", run_name, said="letters, digits, dot, dash and underscore"),
    "trainer.project_name": together(
        "track",
        "verl_examples",
        "of W&B's project, MLflow's experiment",
    ),
    "trainer.logger": Row(loggers, "track", said="MLflow is on here by default, in a file"),
    "trainer.total_epochs": Row(length, "train.total_epochs", 30),
    "trainer.total_training_steps": to("train.total_steps", whole, off=(None,)),
    "trainer.nnodes": Row(nodes, "train.layout.data", 1, "GPUs / (tensor x pipeline x context)"),
    "trainer.n_gpus_per_node": to("cluster.gpus_per_node", whole, 8),
    "trainer.save_freq": Row(saved_each, "checkpoint.every_steps"),
    "trainer.test_freq": Row(evaluated_each, "eval.every_steps", -1, "the last step is always evaluated here"),
    "trainer.val_before_train": to("eval.before_training", truth, True),
    "trainer.val_only": missing("`megagrpo eval RECIPE --model ...` evaluates alone"),
    "trainer.resume_mode": chosen(
        "checkpoint.resume",
        {"auto": "auto", "disable": "never"},
        "runs continue from their own directory; an exported model can be another run's model.path",
        said="never refuses to begin where there is a checkpoint",
    ),
    "trainer.resume_from_path": missing("runs continue from their own directory"),
    "trainer.default_local_dir": to("checkpoint.directory", text),
    "trainer.default_hdfs_dir": missing("checkpoint.directory is a path that all nodes reach"),
    "trainer.max_actor_ckpt_to_keep": kept(said="all there, the last 2 here, unless given"),
    "trainer.max_critic_ckpt_to_keep": always("a checkpoint has both"),
    "trainer.max_ckpt_to_keep": kept(),
    "trainer.del_local_ckpt_after_load": missing("checkpoint.keep_last removes old ones"),
    "trainer.balance_batch": always("data ranks always get equal parts of the work"),
    "trainer.log_val_generations": always("all responses of evaluations are kept in evaluations/"),
    "trainer.rollout_data_dir": always("samples are kept in rollouts/ of the run's directory"),
    "trainer.validation_data_dir": always("samples are kept in evaluations/ of the run's directory"),
    "trainer.device": missing("cuda or cpu", (*OFF, "cuda")),
    "trainer.use_legacy_worker_impl": always("there is one kind of worker"),
    "trainer.ray_wait_register_center_timeout": always("cluster.start_timeout_seconds limits the start"),
    "trainer.esi_redundant_time": missing("a signal saves a checkpoint: docs/reliability.md"),
    "trainer.use_v1": always("there is one trainer"),
}

OTHERS: Table = {
    "--config-path": always("--config-name says which file"),
    "--config-name": Row(own_file, said="verl's own files are known here; give others as a resolved configuration"),
    "--config-dir": missing("options of other files are not read: give the resolved configuration"),
    "defaults": missing("options of other files are not read: print the whole by `--cfg job --resolve`, and give that"),
    "hydra.*": always("of Hydra itself"),
    "*._target_": always("of Hydra itself"),
    "ray_kwargs.*": always("cluster.address says which Ray cluster to join"),
    "ray_init.*": always("cluster.address says which Ray cluster to join"),
    "transfer_queue.*": always("samples go from the driver to the ranks"),
    "global_profiler.*": always("train.profile writes traces of chosen steps"),
    "*.profiler.*": always("train.profile writes traces of chosen steps"),
}
