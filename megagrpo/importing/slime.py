"""slime's options of train.py, Megatron's and SGLang's among them, one by one, and how its scripts are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megagrpo.importing.options import Configuration, command_line, flags
from megagrpo.importing.rows import (
    OFF,
    Answer,
    Missing,
    Nothing,
    NotKnownError,
    Options,
    Row,
    Table,
    Write,
    always,
    chosen,
    missing,
    number,
    picked,
    text,
    texts,
    to,
    together,
    truth,
    whole,
)
from megagrpo.importing.translate import Framework
from megagrpo.importing.values import layout_of, microbatches, run_name, set_name

FUNCTIONS = {
    "math": "math",
    "deepscaler": "math",
    "dapo": "math",
    "f1": "f1",
    "gpqa": "multiple_choice",
}
ADVANTAGES = {
    "grpo": "grpo",
    "gspo": "grpo",
    "cispo": "grpo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "ppo": "gae",
}
OWN_CODE = "functions have another form here: see docs/rewards.md, docs/algorithms.md and docs/agents.md for your own"
OF_CONFIG = always("config.json of the model says it")


def is_program(word: str) -> bool:
    return word.rpartition("/")[2] in ("train.py", "train_async.py")


def read(path: Path, set_to: Mapping[str, str], environment: Mapping[str, str]) -> Configuration:
    """Reads a script that runs train.py or train_async.py, or `ray job submit` of one. Raises RecipeError otherwise."""
    words, notes = command_line(path, is_program, set_to, environment, "python3 train.py ...")
    return Configuration(path, flags(words), notes)


def longest(options: Options) -> int:
    return options.whole("rollout_max_prompt_len") + options.whole("rollout_max_response_len")


def train_gpus(options: Options) -> int:
    return options.whole("actor_num_nodes") * options.whole("actor_num_gpus_per_node")


def nodes(value: Any, options: Options) -> Answer:
    axes = ("tensor", "pipeline", "context")
    sizes = {axis: options.whole(f"{axis}_model_parallel_size".replace("context_model", "context")) for axis in axes}
    engine, others = options.whole("rollout_num_gpus_per_engine"), options["rollout_num_gpus"]
    engines = None if truth(options["colocate"]) or others is None else whole(others) // engine
    return layout_of(train_gpus(options), sizes, engine, engines)


def minibatches(value: Any, options: Options) -> Answer:
    if value is None:
        return Nothing("num_steps_per_rollout says it")
    samples = options.whole("rollout_batch_size") * options.whole("n_samples_per_prompt")
    if samples % whole(value):
        return Missing(f"{samples} samples are no multiple of {value}: minibatches have equal sizes here")
    return Write({"algorithm.minibatches": samples // whole(value)})


def estimator(value: Any, options: Options) -> Answer:
    name = text(value)
    if name not in ADVANTAGES:
        return Missing("advantages here are listed in docs/algorithms.md")
    loss = {"algorithm.loss.name": name} if name in ("gspo", "cispo") else {}
    return Write({"algorithm.advantage.name": ADVANTAGES[name], **loss})


def deviation(value: Any, options: Options) -> Answer:
    if options["advantage_estimator"] not in ("grpo", "gspo", "cispo"):
        return Nothing("only GRPO's advantages read it")
    return Write({"algorithm.advantage.standard_deviation": "none" if truth(value) else "sample"})


def clip(side: str) -> Row:
    def answer(value: Any, options: Options) -> Answer:
        bound = number(options["eps_clip"] if value is None else value)
        return Write({f"algorithm.loss.clip_{side}": min(bound, 1) if side == "low" else bound})

    return Row(answer, f"algorithm.loss.clip_{side}", 0.2 if side == "low" else None)


def kl(field: str, default: Any = None) -> Row:
    def answer(value: Any, options: Options) -> Answer:
        in_loss = truth(options["use_kl_loss"]) and options.number("kl_loss_coef") > 0
        if not in_loss:
            return Nothing("there is no KL penalty in the loss")
        if field == "algorithm.kl.coefficient":
            return Write({field: number(value), "algorithm.kl.placement": "loss"})
        if name := picked({"k2": "k2", "k3": "k3", "low_var_kl": "k3"}, value):
            return Write({field: name})
        return Missing("k1 has no gradient in expectation as a term of the loss; the recipe has k3")

    return Row(answer, field, default)


def kl_in_reward(value: Any, options: Options) -> Answer:
    if not number(value):
        return Nothing("no penalty in the reward")
    if truth(options["use_kl_loss"]) and options.number("kl_loss_coef") > 0:
        return Missing("the penalty has one place here: it is in the loss")
    fields = {"coefficient": number(value), "estimator": "k1", "placement": "reward"}
    return Write({f"algorithm.kl.{name}": part for name, part in fields.items()})


def weights(value: Any, options: Options) -> Answer:
    if not truth(value):
        return Nothing("no weights, as here")
    low, high = options.number("tis_clip_low"), options.number("tis_clip")
    return Write({"algorithm.correction.weights": {"name": "token", "low": low, "high": high}})


def prompts(value: Any, options: Options) -> Answer:
    return Write({"data.train": [{"path": path, **columns(options)} for path in texts(value)]})


def columns(options: Options) -> dict[str, Any]:
    prompt, label = text(options["input_key"]), options["label_key"]
    own = {"prompt": prompt} if prompt != "prompt" else {}
    truths = {"ground_truth": text(label)} if label not in (None, "ground_truth") else {}
    return {"columns": {**own, **truths, "data_source": {"value": "slime"}}}


def held_out(value: Any, options: Options) -> Answer:
    listed = texts(value)
    if len(listed) % 2:
        raise NotKnownError(f"{value!r} is no list of names, each with its file")
    pairs = zip(listed[::2], listed[1::2], strict=True)
    if options["eval_interval"] is None:
        return Nothing("it never evaluates: without eval_interval")
    return Write(
        {"eval.sets": {set_name(name): {"files": [{"path": path, **columns(options)}]} for name, path in pairs}}
    )


def reward(value: Any, options: Options) -> Answer:
    name = text(value).removeprefix("boxed_")
    if name not in FUNCTIONS:
        return Missing("functions are listed in docs/rewards.md; a server is function: remote")
    return Write({"reward.functions": [{"function": FUNCTIONS[name]}]})


def microbatch(value: Any, options: Options) -> Answer:
    least = -(-longest(options) // options.whole("context_parallel_size"))
    return Write({"train.tokens_per_microbatch": max(whole(value), least)})


def partial(value: Any, options: Options) -> Answer:
    if not truth(value):
        return Nothing("off, as here")
    more = options.whole("over_sampling_batch_size") - options.whole("rollout_batch_size")
    if more <= 0:
        return Nothing("over_sampling_batch_size is no larger than rollout_batch_size")
    return Write({"schedule.kind": "sync", "schedule.carry_over": more, "schedule.max_staleness": 2})


def recompute(value: Any, options: Options) -> Answer:
    if value == "selective":
        modules = options["recompute_modules"]
        return Write({"train.recompute": {"modules": texts(modules)} if modules else "selective"})
    layers, block = options["recompute_num_layers"], options["recompute_method"] == "block"
    return Write({"train.recompute": {"layers": whole(layers)} if block and layers else "full"})


def rest(options: Options, fields: Mapping[str, Any]) -> Mapping[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {
        "rollout.engine": ("sglang", "engines are SGLang's in both"),
        "cluster.device": ("cuda", "it runs on GPUs"),
    }
    if truth(options["colocate"]):
        found["rollout.sglang.enable_memory_saver"] = (True, "engines give their memory back while training")
        found["train.offload"] = (["gradients", "optimizer"], "colocate moves them away while engines sample")
    else:
        found["cluster.placement"] = ("disaggregated", "without --colocate engines have GPUs of their own")
    if "train.tokens_per_microbatch" not in fields:
        found["train.tokens_per_microbatch"] = microbatches(longest(options))
    if any(path.startswith("eval.") for path in fields) and "eval.temperature" not in fields:
        found["eval.temperature"] = (options.number("rollout_temperature"), "evaluation samples as training does")
    return found


TABLE: Table = {
    "hf_checkpoint": to("model.path", text),
    "ref_load": always("the reference policy has the weights of model.path"),
    "load": always("a run continues from its own directory"),
    "prompt_data": Row(prompts, "data.train"),
    "input_key": together("data.train.0.columns.prompt", "input"),
    "label_key": together("data.train.0.columns.ground_truth", None),
    "metadata_key": always("all columns of a row reach its reward"),
    "tool_key": missing("tools are an agent here: docs/agents.md", (*OFF, "tools")),
    "multimodal_keys": missing("models here read text only"),
    "apply_chat_template": always("prompts are messages, and the template is applied"),
    "apply_chat_template_kwargs": to("data.chat_template_arguments", lambda value: value),
    "rollout_shuffle": to("data.shuffle", truth, False, "off there unless given, on here"),
    "rollout_seed": to("seed", whole, 42),
    "seed": always("one seed for all: rollout_seed counts"),
    "rollout_batch_size": to("rollout.prompts_per_step", whole),
    "n_samples_per_prompt": to("rollout.samples_per_prompt", whole, 1),
    "rollout_max_prompt_len": to("data.prompt_tokens_max", whole, 1024, "no limit there unless given"),
    "rollout_max_response_len": to("rollout.response_tokens_max", whole, 1024),
    "rollout_max_context_len": missing(
        "prompts and responses have limits of their own; agent.tokens_max with an agent"
    ),
    "rollout_temperature": to("rollout.temperature", number, 1.0),
    "rollout_top_p": to("rollout.top_p", number, 1.0, "1 in training"),
    "rollout_top_k": to("rollout.top_k", lambda value: max(0, whole(value)), -1, "0 for all; 0 in training"),
    "rollout_stop": missing("a response ends at tokens: rollout.stop_token_ids"),
    "rollout_stop_token_ids": to("rollout.stop_token_ids", lambda value: value if isinstance(value, list) else [value]),
    "rollout_skip_special_tokens": always("tokens go in and come out"),
    "global_batch_size": Row(
        minibatches, "algorithm.minibatches", None, "samples of a minibatch there, their number here"
    ),
    "num_steps_per_rollout": to("algorithm.minibatches", whole, off=(None,)),
    "micro_batch_size": always("microbatches are packed by tokens"),
    "use_dynamic_batch_size": always("microbatches are packed by tokens"),
    "max_tokens_per_gpu": Row(microbatch, "train.tokens_per_microbatch"),
    "log_probs_max_tokens_per_gpu": missing(
        "write train.logprob_tokens_per_microbatch, a multiple of tokens_per_microbatch"
    ),
    "log_probs_chunk_size": always("logprobs are computed from hidden states without whole logits"),
    "balance_data": always("data ranks always get equal parts of the work"),
    "balance_by_flops": always("data ranks always get equal parts of the work"),
    "num_rollout": to("train.total_steps", whole, off=(None,)),
    "num_epoch": to("train.total_epochs", whole, off=(None,)),
    "over_sampling_batch_size": together("schedule.carry_over", 0),
    "partial_rollout": Row(partial, "schedule.carry_over"),
    "dynamic_sampling_filter_path": Row(
        lambda value, _: Write({"rollout.dynamic_sampling.rounds_max": 4}),
        "rollout.dynamic_sampling",
        said="groups of equal scores are replaced",
    ),
    "rm_type": Row(reward, "reward.functions"),
    "custom_rm_path": missing(OWN_CODE),
    "custom_*": missing(OWN_CODE),
    "rm_url": missing("function: remote asks a server"),
    "reward_key": missing("a score is one number, its parts are metrics"),
    "group_rm": missing("a function that names `responses` gets the whole group: docs/rewards.md"),
    "eval_prompt_data": Row(held_out, "eval.sets"),
    "eval_interval": to("eval.every_steps", whole, None, off=(None,)),
    "skip_eval_before_train": to("eval.before_training", lambda value: not truth(value), False),
    "n_samples_per_eval_prompt": to("eval.samples_per_prompt", whole, 1),
    "eval_max_response_len": to("eval.response_tokens_max", whole),
    "eval_temperature": to("eval.temperature", number),
    "eval_top_p": Row(
        lambda value, options: (
            Nothing("evaluation is greedy")
            if options["eval_temperature"] == 0
            else Write({"eval.top_p": number(value)})
        ),
        "eval.top_p",
    ),
    "eval_top_k": to("eval.top_k", lambda value: max(0, whole(value))),
    "eval_*": missing("see eval in docs/evaluation.md"),
    "advantage_estimator": Row(estimator, "algorithm.advantage", "grpo", "gspo and cispo are losses here"),
    "disable_grpo_std_normalization": Row(deviation, "algorithm.advantage.standard_deviation", False),
    "normalize_advantages": missing("reinforce_plus_plus_baseline and gdpo whiten over the step"),
    "disable_rewards_normalization": missing("an advantage such as reinforce_plus_plus compares no groups"),
    "eps_clip": clip("low"),
    "eps_clip_high": clip("high"),
    "eps_clip_c": to("algorithm.loss.dual_clip", number, off=(None,)),
    "use_kl_loss": together("algorithm.kl.placement", False),
    "kl_loss_coef": kl("algorithm.kl.coefficient", 0.0),
    "kl_loss_type": kl("algorithm.kl.estimator", "k1"),
    "kl_coef": Row(kl_in_reward, "algorithm.kl.coefficient", 0.0, "placement: reward"),
    "use_unbiased_kl": missing("algorithm.kl.straight_through has the gradient of k2"),
    "ref_update_interval": to("algorithm.reference.update_every_steps", whole, off=(None,)),
    "entropy_coef": to("algorithm.entropy_coefficient", number, 0.0),
    "calculate_per_token_loss": to(
        "algorithm.aggregation.name",
        lambda value: "token_mean" if truth(value) else "seq_mean_token_mean",
        False,
        "a mean of responses' means there unless given, of tokens here",
    ),
    "gamma": missing("write `advantage: {name: gae, discount: 1.0}`", (*OFF, 1.0)),
    "lambd": missing("write `advantage: {name: gae, trace: 1.0}`", (*OFF, 1.0)),
    "value_clip": always("algorithm.critic.value_clip, with gae"),
    "use_tis": Row(weights, "algorithm.correction.weights", False),
    "tis_clip": together("algorithm.correction.weights.high", 2.0),
    "tis_clip_low": together("algorithm.correction.weights.low", 0),
    "use_rollout_logprobs": to("algorithm.rollout_logprobs_as_old", truth),
    "get_mismatch_metrics": always("docs/mismatch.md: always reported"),
    "use_routing_replay": missing("routes of experts are not replayed; look at docs/mismatch.md"),
    "use_rollout_routing_replay": missing("routes of experts are not replayed; look at docs/mismatch.md"),
    "use_opsm": missing("algorithm.correction.reject leaves responses out"),
    "use_opd": missing("no distillation"),
    "optimizer": missing("Adam with decoupled weight decay", (*OFF, "adam")),
    "lr": to("train.optimizer.lr", number, 1e-6),
    "min_lr": to("train.optimizer.min_lr", number),
    "lr_decay_style": chosen(
        "train.optimizer.schedule",
        {"constant": "constant", "linear": "linear", "cosine": "cosine"},
        "constant, linear or cosine",
        "linear",
        "linear to 0 there unless given",
    ),
    "lr_warmup_iters": to("train.optimizer.warmup_steps", whole),
    "weight_decay": to("train.optimizer.weight_decay", number, 0.01, "0 here unless given"),
    "adam_beta1": to("train.optimizer.beta1", number, 0.9),
    "adam_beta2": to("train.optimizer.beta2", number, 0.999, "0.95 here unless given"),
    "adam_eps": to("train.optimizer.epsilon", number, 1e-8),
    "clip_grad": to("train.optimizer.clip_grad", number, 1.0),
    "optimizer_cpu_offload": missing("train.offload: [optimizer], while engines sample"),
    "overlap_cpu_optimizer_d2h_h2d": missing("train.offload: [optimizer], while engines sample"),
    "use_precision_aware_optimizer": missing("train.optimizer.moment_dtype: bfloat16"),
    "tensor_model_parallel_size": to("train.layout.tensor", whole, 1),
    "pipeline_model_parallel_size": to("train.layout.pipeline", whole, 1),
    "context_parallel_size": to("train.layout.context", whole, 1),
    "expert_model_parallel_size": to("train.layout.expert", whole, 1),
    "expert_tensor_parallel_size": to("train.layout.expert_tensor", whole, off=(None,)),
    "decoder_first_pipeline_num_layers": to("train.layout.first_stage_layers", whole),
    "decoder_last_pipeline_num_layers": to("train.layout.last_stage_layers", whole),
    "sequence_parallel": always("comes with tensor ranks"),
    "use_distributed_optimizer": always("on by default"),
    "recompute_granularity": Row(recompute, "train.recompute"),
    "recompute_method": always("recompute_granularity counts"),
    "recompute_num_layers": always("recompute_granularity counts"),
    "recompute_modules": always("recompute_granularity counts"),
    "accumulate_allreduce_grads_in_fp32": always("train.gradient_dtype: float32"),
    "attention_softmax_in_fp32": always("Megatron's own"),
    "attention_backend": always("Transformer Engine chooses; train.layer_spec says which layers"),
    "attention_dropout": missing("0", (*OFF, 0.0)),
    "hidden_dropout": missing("0", (*OFF, 0.0)),
    "moe_*": to("train.megatron.*", lambda value: value),
    "actor_num_nodes": Row(nodes, "train.layout.data", 1, "GPUs / (tensor x pipeline x context)"),
    "actor_num_gpus_per_node": to("cluster.gpus_per_node", whole, 8),
    "num_gpus_per_node": always("actor_num_gpus_per_node counts"),
    "rollout_num_gpus": together("rollout.engines", None),
    "rollout_num_gpus_per_engine": to("rollout.layout.tensor", whole, 1),
    "colocate": together("cluster.placement", False),
    "offload": always("train.offload, with placement: colocated"),
    "offload_train": always("train.offload, with placement: colocated"),
    "offload_rollout": always("engines give their memory back while the ranks train"),
    "sglang_mem_fraction_static": to("rollout.sglang.mem_fraction_static", lambda value: float(number(value))),
    "sglang_*": to("rollout.sglang.*", lambda value: value),
    "update_weight_buffer_size": to("weights.bucket_bytes", whole),
    "update_weight_*": missing("weights.transfer: auto chooses"),
    "use_fault_tolerance": always("engines and ranks that fail are started again: docs/reliability.md"),
    "rollout_health_check_*": always("engines and ranks that fail are started again: docs/reliability.md"),
    "save": to("checkpoint.directory", text),
    "save_interval": to("checkpoint.every_steps", whole),
    "save_hf": missing("checkpoint.export_every_steps writes Hugging Face models"),
    "async_save": always("training waits for a copy in memory; files are written meanwhile"),
    "no_save_optim": missing("checkpoints are whole here, so that a run can continue"),
    "use_wandb": Row(
        lambda value, options: (
            Write({"track.wandb.project": text(options["wandb_project"] or "slime")})
            if truth(value)
            else Nothing("off")
        ),
        "track.wandb",
    ),
    "wandb_project": together("track.wandb.project", None),
    "wandb_group": to("name", run_name),
    "wandb_team": Row(
        lambda value, options: (
            Write({"track.wandb.entity": text(value)}) if truth(options["use_wandb"]) else Nothing("no W&B")
        ),
        "track.wandb.entity",
    ),
    "wandb_*": always("W&B's own variables say it"),
    "use_tensorboard": to("track.tensorboard", truth),
    "tb_*": always("track.directory"),
    "log_*": always("metrics are in docs/metrics.md"),
    "dump_details": always("samples are kept in rollouts/ of the run's directory"),
    "save_debug_*": always("checkpoint.keep_batches keeps whole steps"),
    "check_weight_update_equal": always("every sync is compared by digests"),
    "rollout_function_path": missing(OWN_CODE),
    "rollout_external_engine_addrs": missing("write `rollout: {engine: external, urls: [...]}`"),
    "loss_type": missing(
        "`megagrpo sft` fine-tunes; losses of your own are algorithm.loss: FILE.py:FUNCTION", (*OFF, "policy_loss")
    ),
    "debug_train_only": missing("`megagrpo train --train-only` trains on saved samples"),
    "debug_rollout_only": missing("`megagrpo train --rollout-only` samples alone"),
    "load_debug_rollout_data": missing("`megagrpo train --train-only` trains on saved samples"),
    "lr_warmup_fraction": missing("give train.optimizer.warmup_steps"),
    "train_backend": always("Megatron in both"),
    "transformer_impl": always("train.layer_spec says which layers"),
    "bf16": always("bfloat16 on GPUs"),
    "fp8_*": missing("rollout.quantization: fp8 is for engines"),
    "mtp_*": missing("heads for further tokens are neither trained nor used"),
    "enable_mtp_training": missing("heads for further tokens are neither trained nor used"),
    "opd_*": missing("no distillation"),
    "num_experts": OF_CONFIG,
    "position_embedding_type": OF_CONFIG,
    "rotary_percent": OF_CONFIG,
    "swiglu": OF_CONFIG,
    "num_layers": OF_CONFIG,
    "hidden_size": OF_CONFIG,
    "ffn_hidden_size": OF_CONFIG,
    "num_attention_heads": OF_CONFIG,
    "group_query_attention": OF_CONFIG,
    "num_query_groups": OF_CONFIG,
    "use_rotary_position_embeddings": OF_CONFIG,
    "disable_bias_linear": OF_CONFIG,
    "normalization": OF_CONFIG,
    "norm_epsilon": OF_CONFIG,
    "rotary_base": OF_CONFIG,
    "vocab_size": OF_CONFIG,
    "kv_channels": OF_CONFIG,
    "qk_layernorm": OF_CONFIG,
    "add_qkv_bias": OF_CONFIG,
    "untie_embeddings_and_output_weights": OF_CONFIG,
}
SLIME = Framework("slime", "slime", TABLE, rest)
