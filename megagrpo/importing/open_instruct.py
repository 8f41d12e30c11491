"""open-instruct's options of grpo_fast.py, one by one, and how its scripts are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megagrpo.importing.options import Configuration, Given, command_line, flags
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
from megagrpo.importing.values import FULL_RECOMPUTE, kept, run_name, set_name, warmup

VERIFIERS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [{"function": "gsm8k", "arguments": {"method": "flexible"}}],
    "math": [{"function": "math"}],
    "strict_math": [{"function": "strict_math"}],
    "ifeval*": [{"function": "ifeval"}],
    "string_matcher": [{"function": "string_match", "arguments": {"tag_required": True}}],
    "string_f1": [{"function": "f1"}],
    "puzzle": [{"function": "string_match"}],
    "flan": [{"function": "string_match", "arguments": {"after": "The answer is:", "after_required": False}}],
    "re_search": [{"function": "search_answer", "arguments": {"tag": "finish"}}],
    "re_search_f1": [
        {"function": "search_answer", "arguments": {"method": "f1", "tag": "finish", "format_score": 0.1}}
    ],
    "code*": [{"function": "code", "arguments": {"credit": "share"}}],
}
"""Functions by the name of a verifier, which rows have in `dataset`."""
BY_DATASET = "by the row's `dataset` in both; strict_math takes an equal value for right, too"
AGENT = "tools and environments are an agent here: write an `agent` section, see docs/agents.md"
AFTER_EXPORT = "checkpoint.after_export starts a command for each exported model"
SHARDED = "Megatron-Core splits the policy by train.layout, and the optimizer over data ranks"
JUDGE = "a judge is function: judge, with reward.models or a server: see docs/rewards.md"


def is_program(word: str) -> bool:
    return word.rpartition("/")[2] in ("grpo_fast.py", "grpo.py") or word.endswith((".grpo_fast", ".grpo"))


def read(path: Path, set_to: Mapping[str, str], environment: Mapping[str, str]) -> Configuration:
    """Reads a script that runs grpo_fast.py, itself or through another command. Raises RecipeError if it does not."""
    words, notes = command_line(path, is_program, set_to, environment, "python open_instruct/grpo_fast.py ...")
    given = flags(words)
    for name, one in list(given.items()):
        if name.startswith("no_") and name not in TABLE and name[3:] in TABLE:
            del given[name]
            given[name[3:]] = Given(name[3:], False, one.line)
    return Configuration(path, given, notes)


def learners(options: Options) -> int:
    found = options["num_learners_per_node"]
    return sum(map(whole, found)) if isinstance(found, list) else whole(found)


def colocated(options: Options) -> bool:
    return options.true("single_gpu_mode")


def rows_per_step(options: Options) -> int:
    return options.whole("num_unique_prompts_rollout") * options.whole("num_samples_per_prompt_rollout")


def train_ranks(value: Any, options: Options) -> Answer:
    context, ranks = options.whole("sequence_parallel_size"), learners(options)
    if ranks % context:
        return Missing(f"{ranks} learners are no multiple of sequence_parallel_size {context}: give train.layout")
    return Write({"train.layout.data": ranks // context})


def amounts(value: Any) -> list[tuple[str, int | float]]:
    listed = value if isinstance(value, list) else [value]
    if len(listed) == 1 and isinstance(listed[0], str):
        listed = listed[0].split()
    if len(listed) % 2:
        raise NotKnownError(f"{value!r} is no list of data sets, each with its amount")
    pairs = []
    for name, amount in zip(listed[::2], listed[1::2], strict=True):
        if isinstance(amount, str):
            amount = float(amount) if "." in amount else int(amount)
        pairs.append((text(name), number(amount)))
    return pairs


def entries(pairs: list[tuple[str, int | float]]) -> list[dict[str, Any]]:
    """Returns entries of data. A data set of the hub is a folder there; an amount with a dot is a share of rows."""

    def place(name: str) -> str:
        return name if name.startswith((".", "/")) or "." in Path(name).suffix else f"hf://datasets/{name}"

    return [
        {"path": place(name)} | ({"amount": amount} if not isinstance(amount, float) or amount != 1.0 else {})
        for name, amount in pairs
    ]


def mixture(value: Any, options: Options) -> Answer:
    note = (
        "data sets of the hub are read at hf://, all files of a set: name those of one split where it has several; "
        "`megagrpo prepare jsonl --hub NAME` keeps a copy in a folder"
    )
    return Write({"data.train": entries(amounts(value))}, note)


def held_out(value: Any, options: Options) -> Answer:
    if options.whole("local_eval_every") <= 0:
        return Nothing("local_eval_every is off")
    return Write({"eval.sets": {set_name(name): {"files": entries([(name, n)])} for name, n in amounts(value)}})


def verified(value: Any, options: Options) -> Answer:
    if not truth(value):
        return Missing("give the functions that score in reward.functions")
    weight = options.number("verification_reward")
    tolerance = options.whole("max_length_verifier_max_length")
    lengths = {
        name: [{"function": "length", "arguments": {"kind": kind, "tolerance": tolerance}}]
        for name, kind in (("max_length", "target"), ("up_to_max_length", "budget"))
    }
    by_source = VERIFIERS | lengths
    scaled = {name: [{**one, "weight": weight} for one in functions] for name, functions in by_source.items()}
    return Write({"reward.by_source": scaled})


def estimator(value: Any, options: Options) -> Answer:
    if options.number("beta") == 0:
        return Nothing("beta is 0")
    if name := picked({1: "k2", 2: "k3"}, value):
        return Write({"algorithm.kl.estimator": name})
    return Missing(
        "0 has no gradient in expectation as a term of the loss, and 3 is not here; the recipe has k3 (their 2)"
    )


def clamp(value: Any, options: Options) -> Answer:
    if not options.true("use_rho_correction"):
        return Nothing("use_rho_correction is false")
    if not number(value):
        return Missing("weights have an upper bound: algorithm.correction.weights.high")
    low = options.number("rho_clamp_lower_bound")
    return Write({"algorithm.correction.weights": {"name": "token", "low": low, "high": number(value)}})


def mask(value: Any, options: Options) -> Answer:
    low, high = options.number("rho_mask_lower_bound"), options.number("rho_mask_upper_bound")
    if not options.true("use_rho_correction") or not (low or high):
        return Nothing("nothing is masked")
    level = {"level": "sequence", "over": "mean"} if options.true("rho_mask_sequence_level") else {"level": "token"}
    bounds = ({"low": low} if low else {}) | ({"high": high} if high else {})
    note = "what is left out is not in the loss's denominators here; there it counts as 0"
    return Write({"algorithm.correction.reject": [{**level, "statistic": "ratio", **bounds}]}, note)


def asynchronous(value: Any, options: Options) -> Answer:
    if colocated(options):
        return Missing("on one GPU engines and trainer take turns: schedule is sync")
    fields: dict[str, Any] = {"schedule.kind": "async", "schedule.max_staleness": whole(value)}
    return Write(fields, "groups that would become older than max_staleness are not begun, so that none is dropped")


def active(value: Any, options: Options) -> Answer:
    return Write({"rollout.dynamic_sampling.rounds_max": 4}) if truth(value) else Nothing("off, as here")


def scaled(value: Any, options: Options) -> Answer:
    kind = picked({"standard": "population", "centered": "none"}, value)
    if kind is None:
        return Missing("standard or centered")
    epsilon = {"algorithm.advantage.epsilon": 1e-8} if value == "standard" else {}
    return Write({"algorithm.advantage.standard_deviation": kind, **epsilon})


def clip_low(value: Any, options: Options) -> Answer:
    return Write({"algorithm.loss.clip_low": 1 if options["loss_fn"] == "cispo" else number(value)})


def share_of_warmup(value: Any, options: Options) -> Answer:
    steps = options["max_train_steps"]
    return warmup(number(value), options.whole("total_episodes") // rows_per_step(options) if steps is None else steps)


def format_reward(value: Any, options: Options) -> Answer:
    if not truth(value):
        return Nothing("off, as here")
    why = (
        "there a right answer counts only if the format is right, or both are added; here write function: think_answer"
    )
    return Missing(f"{why} beside the verifier (arguments: {{opened: true}}), see gates in docs/rewards.md")


def penalty(value: Any, options: Options) -> Answer:
    used = truth(options["non_stop_penalty"])
    return Write({"reward.non_stop_score": number(value)}) if used else Nothing("non_stop_penalty is false")


def lora(field: str, of: Any) -> Row:
    def answer(value: Any, options: Options) -> Answer:
        return Write({field: of(value)}) if truth(options["use_peft"]) else Nothing("use_peft is false")

    return Row(answer, field)


def offload(value: Any, options: Options) -> Answer:
    if not truth(value):
        return Nothing("off, as here")
    if not colocated(options):
        return Missing("with engines elsewhere, ranks keep what they need: more data ranks share the optimizer")
    return Write({"train.offload": ["optimizer"]})


def rest(options: Options, fields: Mapping[str, Any]) -> Mapping[str, tuple[Any, str]]:
    longest = options.whole("max_prompt_token_length") + options.whole("response_length")
    found: dict[str, tuple[Any, str]] = {
        "rollout.engine": ("sglang", "engines are SGLang's"),
        "cluster.device": ("cuda", "it runs on GPUs"),
        "train.tokens_per_microbatch": (
            max(longest, options.whole("pack_length")),
            "pack_length or the longest sequence",
        ),
    }
    if "eval.sets" in fields:
        found["eval.temperature"] = (options.number("temperature"), "evaluation samples as training does")
    found |= {"train.optimizer.beta2": (0.999, "torch's default of AdamW")}
    if colocated(options):
        found["rollout.sglang.enable_memory_saver"] = (True, "engines give their memory back while training")
    else:
        found["cluster.placement"] = ("disaggregated", "engines have GPUs of their own")
    return found


WITH_ENGINES: Table = {
    "vllm_num_engines": to("rollout.engines", whole, 1),
    "vllm_tensor_parallel_size": to("rollout.layout.tensor", whole, 1),
    "vllm_gpu_memory_utilization": to(
        "rollout.sglang.mem_fraction_static",
        lambda value: float(number(value)),
        0.9,
        "of weights, keys and values here",
    ),
    "vllm_top_p": to("rollout.top_p", number, 1.0, "1 in training: the trainer does not renormalise over a nucleus"),
    "vllm_enforce_eager": Row(
        lambda value, _: Write({"rollout.sglang.disable_cuda_graph": True}) if truth(value) else Nothing("graphs"),
        "rollout.sglang.disable_cuda_graph",
    ),
    "vllm_enable_prefix_caching": always("SGLang's own"),
    "vllm_sync_backend": always("weights.transfer: auto chooses"),
    "vllm_attention_backend": missing("rollout.sglang.attention_backend is SGLang's"),
    "temperature": to("rollout.temperature", number, 1.0),
    "stop_strings": missing("a response ends at tokens: rollout.stop_token_ids", (*OFF, [])),
    "inflight_updates": Row(
        lambda value, options: (
            Nothing("sync: no request is left when an update begins")
            if colocated(options)
            else Write({"weights.pause": "in_place" if truth(value) else "finish"})
        ),
        "weights.pause",
        True,
        "retract computes the keys anew",
    ),
    "async_steps": Row(asynchronous, "schedule.max_staleness", 8, "versions that weights may be ahead of a group"),
    "single_gpu_mode": Row(
        lambda value, _: (
            Nothing("engines and ranks share a GPU, as here by default")
            if truth(value)
            else Write({"cluster.placement": "disaggregated"})
        ),
        "cluster.placement",
        False,
    ),
    "num_learners_per_node": Row(train_ranks, "train.layout.data", [1], "learners in all / sequence_parallel_size"),
    "num_nodes": always("train.layout and rollout.engines say how many GPUs there are"),
    "sequence_parallel_size": to("train.layout.context", whole, 1, "context ranks, in a ring"),
    "deepspeed_stage": always(SHARDED),
    "deepspeed_zpg": always(SHARDED),
    "gather_whole_model": always("weights are sent in exact shards"),
    "deepspeed_offload_param": missing("look at train.layout and `megagrpo plan --search`"),
    "deepspeed_offload_optimizer": Row(offload, "train.offload"),
    "deepspeed_checkpoint_load_universal": always("a checkpoint can be continued in another layout"),
    "fsdp_*": missing("look at train.layout and `megagrpo plan --search`"),
    "backend_timeout": to("cluster.step_timeout_seconds", lambda value: 60.0 * number(value), said="minutes there"),
}

LEARNING: Table = {
    "num_unique_prompts_rollout": to("rollout.prompts_per_step", whole, 16),
    "num_samples_per_prompt_rollout": to("rollout.samples_per_prompt", whole, 4),
    "response_length": to("rollout.response_tokens_max", whole, 256),
    "max_prompt_token_length": to("data.prompt_tokens_max", whole, 256),
    "pack_length": together("train.tokens_per_microbatch", 512),
    "per_device_train_batch_size": always("microbatches are packed by tokens"),
    "gradient_accumulation_steps": always("algorithm.minibatches says how many updates there are"),
    "num_mini_batches": to("algorithm.minibatches", whole, 1),
    "num_epochs": to("algorithm.epochs", whole, 1, "passes over a step's samples"),
    "total_episodes": Row(
        lambda value, options: (
            Nothing("max_train_steps is given, and counts")
            if options["max_train_steps"] is not None
            else Write({"train.total_episodes": whole(value)})
        ),
        "train.total_episodes",
        100000,
    ),
    "max_train_steps": to("train.total_steps", whole, off=(None,)),
    "beta": to("algorithm.kl.coefficient", number, 0.05, "0 here unless given"),
    "kl_estimator": Row(estimator, "algorithm.kl.estimator", 2, "1 is k2, 2 is k3"),
    "load_ref_policy": always("there is a reference policy if there is a penalty"),
    "ref_policy_update_freq": to("algorithm.reference.update_every_steps", whole, None, off=(None,)),
    "alpha": Row(
        lambda value, options: (
            Nothing("the reference never moves")
            if options["ref_policy_update_freq"] is None
            else Write({"algorithm.reference.share": number(value)})
        ),
        "algorithm.reference.share",
        0.6,
    ),
    "loss_fn": chosen("algorithm.loss.name", {"dapo": "ppo_clip", "cispo": "cispo"}, "dapo or cispo", "dapo"),
    "clip_lower": Row(clip_low, "algorithm.loss.clip_low", 0.2, "cispo has no lower bound there: 1 here"),
    "clip_higher": to("algorithm.loss.clip_high", number, 0.272, "0.2 here unless given"),
    "loss_denominator": chosen(
        "algorithm.aggregation.name",
        {"token": "token_mean"},
        "a constant is `aggregation: {name: seq_mean_token_sum_norm, divisor: N}`, which divides by responses, too",
        "token",
    ),
    "advantage_normalization_type": Row(
        scaled, "algorithm.advantage.standard_deviation", "centered", "n, not n - 1, there; centered divides by nothing"
    ),
    "filter_zero_std_samples": to("algorithm.skip_groups_without_signal", truth, True),
    "active_sampling": Row(active, "rollout.dynamic_sampling", False),
    "no_resampling_pass_rate": to("data.no_resampling_pass_rate", number, off=(None,)),
    "mask_truncated_completions": Row(
        lambda value, _: Write({"reward.truncated": "mask"}) if truth(value) else Nothing("scored, as here"),
        "reward.truncated",
        said="masked ones are in no group's statistics here",
    ),
    "use_rho_correction": together(
        "algorithm.correction",
        True,
        "on there, off here unless given",
    ),
    "rho_clamp_upper_bound": Row(clamp, "algorithm.correction.weights.high", 2.0),
    "rho_clamp_lower_bound": together("algorithm.correction.weights.low", 0.0),
    "rho_mask_lower_bound": Row(mask, "algorithm.correction.reject", 0.0),
    "rho_mask_upper_bound": Row(mask, "algorithm.correction.reject", 0.0),
    "rho_mask_sequence_level": together("algorithm.correction.reject", False),
    "rho_mask_tv_divergence": missing("bounds are of ratios"),
    "use_vllm_logprobs": to("algorithm.rollout_logprobs_as_old", truth, said="the engines' logprobs in both"),
    "record_entropy": always("the entropy is reported, unless algorithm.entropy_metric is false"),
    "learning_rate": to("train.optimizer.lr", number, 2e-5, "1e-6 here unless given"),
    "lr_scheduler_type": chosen(
        "train.optimizer.schedule",
        {"linear": "linear", "constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine"},
        "constant, linear or cosine",
        "linear",
        "linear to 0 there by default",
    ),
    "warmup_ratio": Row(share_of_warmup, "train.optimizer.warmup_steps", 0.0),
    "weight_decay": to("train.optimizer.weight_decay", number, 0.0),
    "max_grad_norm": to("train.optimizer.clip_grad", number, 1.0),
    "set_weight_decay_on_bias_and_norm": missing("norms and biases have none", (*OFF,)),
    "fused_optimizer": always("Transformer Engine's, where it is"),
    "gradient_checkpointing": Row(
        lambda value, _: Write({"train.recompute": FULL_RECOMPUTE}) if truth(value) else Nothing("none, as here"),
        "train.recompute",
    ),
    "activation_*": missing("train.recompute says what is computed again"),
    "compile_model": always("kernels are Megatron's and Transformer Engine's"),
    "seed": to("seed", whole, 42),
    "data_loader_seed": always("seed at the top says it once"),
    "use_peft": together("train.lora", False),
    "lora_r": lora("train.lora.rank", whole),
    "lora_alpha": lora("train.lora.alpha", number),
    "lora_target_modules": lora("train.lora.targets", texts),
    "lora_*": missing("adapters have a rank, alpha and targets"),
}

DATA_AND_REWARD: Table = {
    "model_name_or_path": to("model.path", text),
    "model_revision": to("model.revision", text, off=(None, "main")),
    "tokenizer_name_or_path": to("model.tokenizer", text, off=(None,)),
    "tokenizer_name": to("model.tokenizer", text, off=(None,)),
    "tokenizer_revision": missing("keep tokenizer and model together"),
    "chat_template_name": missing("write the template to a file, and name that in model.chat_template"),
    "add_bos": missing("a chat template that begins with the token does it"),
    "trust_remote_code": missing("code of models is never run"),
    "attn_implementation": always("Transformer Engine chooses; train.layer_spec says which layers"),
    "model_dtype": chosen("model.dtype", {"bfloat16": {}, "float32": "float32"}, "bfloat16 or float32"),
    "dtype": chosen("model.dtype", {"bfloat16": {}, "float32": "float32", None: {}}, "bfloat16 or float32"),
    "dataset_mixer_list": Row(mixture, "data.train", said="amounts in both: a number of rows, or a share with a dot"),
    "dataset_mixer_list_splits": missing("name the split's files in data.train.0.path", (*OFF, "train", ["train"])),
    "dataset_mixer_eval_list": Row(held_out, "eval.sets"),
    "dataset_mixer_eval_list_splits": missing("name the split's files in eval.sets.NAME.files.0.path"),
    "dataset_transform_fn": always("longer prompts are left out: data.overlong_prompts"),
    "dataset_cache_mode": always("tokens of large files are kept in data.cache"),
    "dataset_local_cache_dir": to("data.cache", text),
    "dataset_skip_cache": always("a cache is found again only by the same files and settings"),
    "dataset_config_*": always("a cache is found again only by the same files and settings"),
    "ground_truths_key": Row(
        lambda value, _: (
            Nothing("as here")
            if value == "ground_truth"
            else Missing("name the column in data.train.0.columns.ground_truth")
        ),
        "data.train.0.columns.ground_truth",
    ),
    "sft_messages_key": Row(
        lambda value, _: (
            Nothing("as here")
            if value in ("messages", "prompt")
            else Missing("name the column in data.train.0.columns.prompt")
        ),
        "data.train.0.columns.prompt",
    ),
    "system_prompt_override_file": missing("give its text in data.system_prompt"),
    "max_token_length": always("prompts and responses have limits of their own"),
    "max_seq_length": always("prompts and responses have limits of their own"),
    "apply_verifiable_reward": Row(verified, "reward.by_source", True, BY_DATASET),
    "verification_reward": together("reward.by_source.NAME.0.weight", 10.0),
    "apply_r1_style_format_reward": Row(format_reward, "reward.functions"),
    "r1_style_format_reward": always("apply_r1_style_format_reward counts"),
    "additive_format_reward": always("apply_r1_style_format_reward counts"),
    "remap_verifier": missing("name the source in reward.by_source"),
    "reward_aggregator": always("an agent's turns: algorithm.credit"),
    "non_stop_penalty": together("reward.non_stop_score", False),
    "non_stop_penalty_value": Row(penalty, "reward.non_stop_score", 0.0),
    "llm_judge_*": missing(JUDGE),
    "code_api_url": missing("programs run in a sandbox here; a server is function: remote, shape: open_instruct_code"),
    "code_*": missing("arguments of function: code, or of function: remote: see docs/rewards.md"),
    "max_length_verifier_max_length": together("reward.by_source.max_length.0.arguments.tolerance", 32768),
    "apply_evolving_rubric_reward": missing("function: judge_ranking compares the responses of a group"),
    "max_active_rubrics": always("apply_evolving_rubric_reward counts"),
    "tools": missing(AGENT, (*OFF, [])),
    "tool_*": missing(AGENT, (*OFF, [], "legacy")),
    "mask_tool_use": always("what tools return is never trained on"),
    "max_steps": missing(AGENT, (*OFF, 5)),
    "per_turn_max_tokens": missing(AGENT),
    "pass_tools_to_chat_template": always("tools are in the chat template"),
    "pool_size": always("agent.processes, with an agent"),
}

RUN: Table = {
    "exp_name": to("name", run_name, "grpo"),
    "run_name": always("exp_name is the run's name"),
    "output_dir": to("track.directory", text),
    "local_eval_every": Row(
        lambda value, _: Write({"eval.every_steps": whole(value)}) if whole(value) > 0 else Nothing("no evaluation"),
        "eval.every_steps",
        100,
    ),
    "eval_on_step_0": to("eval.before_training", truth, False),
    "eval_pass_at_k": to("eval.samples_per_prompt", whole, 1),
    "eval_top_p": to("eval.top_p", number, off=(None,)),
    "eval_response_length": to("eval.response_tokens_max", whole, off=(None,)),
    "save_freq": to("checkpoint.export_every_steps", whole, off=(-1,), said="Hugging Face models on the way"),
    "checkpoint_state_freq": to("checkpoint.every_steps", whole, 200, off=(-1,)),
    "checkpoint_state_dir": to("checkpoint.directory", text, off=(None,)),
    "gs_checkpoint_state_dir": missing("checkpoint.directory is a path that all nodes reach"),
    "keep_last_n_checkpoints": kept(3),
    "checkpointing_steps": always("checkpoint_state_freq counts"),
    "resume_from_checkpoint": always("a run continues from its own directory"),
    "with_tracking": Row(
        lambda value, options: (
            Write({"track.wandb.project": text(options["wandb_project"])})
            if truth(value)
            else Nothing("MLflow and files, as here")
        ),
        "track.wandb",
    ),
    "wandb_project": together("track.wandb.project", "open_instruct"),
    "wandb_entity": to("track.wandb.entity", text, off=(None,)),
    "save_traces": always("samples are kept in rollouts/ of the run's directory"),
    "rollouts_save_path": always("samples are kept in rollouts/ of the run's directory"),
    "push_to_hub": missing(AFTER_EXPORT),
    "hf_*": missing(AFTER_EXPORT),
    "try_launch_beaker_eval_jobs_on_weka": missing(AFTER_EXPORT),
    "try_auto_save_to_beaker": missing(AFTER_EXPORT),
    "oe_eval_*": missing(AFTER_EXPORT),
    "eval_priority": always("of jobs that are not started here"),
    "eval_workspace": always("of jobs that are not started here"),
    "gs_bucket_path": missing(AFTER_EXPORT),
    "send_slack_alerts": missing("rollout.alerts warn or stop; a tracker can send messages"),
    "cache_dataset_only": missing("`megagrpo data show` reads the data alone"),
    "enable_queue_dashboard": always("the console and track.prometheus_port show what runs"),
    "queue_dashboard_port": always("the console and track.prometheus_port show what runs"),
    "verbose": always("logs are in the run's directory"),
    "logging_steps": always("every step is logged"),
    "report_to": always("track says which trackers"),
}

TABLE: Table = {**DATA_AND_REWARD, **LEARNING, **WITH_ENGINES, **RUN}
OPEN_INSTRUCT = Framework("open_instruct", "open-instruct", TABLE, rest)
