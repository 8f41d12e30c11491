"""TRL's options of GRPO, one by one, and how they are read: a Python file with GRPOConfig(...), YAML, or a script."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megagrpo.errors import Problem, RecipeError
from megagrpo.importing.options import (
    SCRIPT_SUFFIXES,
    Configuration,
    Given,
    command_line,
    flags,
    read_text,
    yaml_options,
)
from megagrpo.importing.rows import (
    OFF,
    Answer,
    Missing,
    Nothing,
    Options,
    Row,
    Table,
    Together,
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
from megagrpo.importing.shell_words import UNKNOWN
from megagrpo.importing.translate import Framework
from megagrpo.importing.values import FULL_RECOMPUTE, kept, microbatches, run_name, warmup

PYTHON_OBJECTS = ("train_dataset", "eval_dataset", "reward_funcs", "peft_config", "processing_class")
"""Arguments of GRPOTrainer that no recipe can hold."""
LOSSES = {
    "grpo": ("ppo_clip", "seq_mean_token_mean"),
    "dapo": ("ppo_clip", "token_mean"),
    "bnpo": ("ppo_clip", "token_mean"),
    "dr_grpo": ("ppo_clip", "seq_mean_token_sum_norm"),
    "cispo": ("cispo", "token_mean"),
    "sapo": ("sapo", "seq_mean_token_mean"),
}
"""Loss and aggregation by loss_type."""


def is_program(word: str) -> bool:
    return word == "grpo" or word.rpartition("/")[2] in ("grpo.py", "grpo_trainer.py")


def read(path: Path, set_to: Mapping[str, str], environment: Mapping[str, str]) -> Configuration:
    """Reads a Python file, a script that runs `trl grpo`, or YAML. Raises RecipeError if the file is none of them."""
    if path.suffix in SCRIPT_SUFFIXES:
        words, notes = command_line(path, is_program, set_to, environment, "trl grpo ...")
        return Configuration(path, flags(words), notes)
    given = python_options(path) if path.suffix == ".py" else yaml_options(path)
    return Configuration(path, given)


def python_options(path: Path) -> dict[str, Given]:
    """Reads the arguments of GRPOConfig(...) and GRPOTrainer(...) in a Python file; nothing is run."""
    try:
        tree = ast.parse(read_text(path))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise RecipeError(Problem(str(path), f"no Python: {error}", "a Python file with GRPOConfig(...)")) from None
    given: dict[str, Given] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        for keyword in node.keywords:
            wanted = name == "GRPOConfig" or (name == "GRPOTrainer" and keyword.arg in ("model", *PYTHON_OBJECTS))
            if wanted and keyword.arg:
                own = keyword.arg in PYTHON_OBJECTS
                value = ast.unparse(keyword.value) if own else _literal(keyword.value)
                given[keyword.arg] = Given(keyword.arg, value, keyword.value.lineno)
    if not given:
        raise RecipeError(Problem(str(path), "no GRPOConfig(...) with arguments", "a Python file that makes one"))
    return given


def _literal(node: ast.expr) -> Any:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return UNKNOWN + ast.unparse(node)
    return list(value) if isinstance(value, tuple) else value


def devices(options: Options) -> int:
    return options.whole("num_processes")


def batch(options: Options) -> int:
    """Returns the number of responses of a step, which are generated at once."""
    if options["generation_batch_size"] is not None:
        return options.whole("generation_batch_size")
    return options.whole("per_device_train_batch_size") * devices(options) * generations(options)


def generations(options: Options) -> int:
    accumulated = options.whole("gradient_accumulation_steps")
    steps = options["steps_per_generation"]
    return accumulated if steps is None else whole(steps)


def prompts(value: Any, options: Options) -> Answer:
    samples = options.whole("num_generations")
    if batch(options) % samples:
        return Missing(f"{batch(options)} responses are no multiple of {samples}: give rollout.prompts_per_step")
    note = "counted for num_processes processes: add --set num_processes=N to this command if there are others"
    fields = {"rollout.prompts_per_step": batch(options) // samples, "train.layout.data": devices(options)}
    return Write({**fields, "rollout.engines": devices(options)}, note)


def updates(value: Any, options: Options) -> Answer:
    steps, accumulated = generations(options), options.whole("gradient_accumulation_steps")
    if steps % accumulated:
        return Missing("steps_per_generation is no multiple of gradient_accumulation_steps: give algorithm.minibatches")
    return Write({"algorithm.minibatches": steps // accumulated})


def total(value: Any, options: Options) -> Answer:
    each = max(1, generations(options) // options.whole("gradient_accumulation_steps")) * options.whole(
        "num_iterations"
    )
    if whole(value) <= 0:
        return Nothing("num_train_epochs counts")
    return Write({"train.total_steps": -(-whole(value) // each)}, "optimizer steps there, steps with new samples here")


def epochs(value: Any, options: Options) -> Answer:
    if options.whole("max_steps") > 0:
        return Nothing("max_steps is given, and counts")
    return Write({"train.total_epochs": max(1, round(number(value)))})


def loss(value: Any, options: Options) -> Answer:
    found = picked(LOSSES, value)
    if found is None:
        return Missing("losses here are listed in docs/algorithms.md")
    name, aggregation = found
    by_sequence = options["importance_sampling_level"] == "sequence" and name == "ppo_clip"
    return Write({"algorithm.loss.name": "gspo" if by_sequence else name, "algorithm.aggregation.name": aggregation})


def clip_low(value: Any, options: Options) -> Answer:
    kinds = {"cispo": 1, "sapo": None}
    bound = kinds.get(text(options["loss_type"]), min(number(value), 1))
    return Nothing("this loss does not clip") if bound is None else Write({"algorithm.loss.clip_low": bound})


def clip_high(value: Any, options: Options) -> Answer:
    if options["loss_type"] == "sapo":
        return Nothing("this loss does not clip")
    bound = options.number("epsilon") if value is None else number(value)
    less = options["loss_type"] == "cispo"  # its authors bound the weight itself
    return Write({"algorithm.loss.clip_high": max(0.0, bound - 1) if less else bound})


def scaled(value: Any, options: Options) -> Answer:
    kind = picked({"group": "sample", True: "sample", "none": "none", False: "none"}, value)
    if kind is None:
        return Missing("by the group's deviation, or none; reinforce_plus_plus_baseline whitens over the step")
    epsilon = {"algorithm.advantage.epsilon": 1e-4} if kind == "sample" else {}
    return Write({"algorithm.advantage.standard_deviation": kind, **epsilon})


def importance(value: Any, options: Options) -> Answer:
    if not truth(options["vllm_importance_sampling_correction"]) or not truth(options["use_vllm"]):
        return Nothing("no correction: without use_vllm, or switched off")
    level, _, kind = text(value).partition("_")
    high, low = options.number("vllm_importance_sampling_clip_max"), options["vllm_importance_sampling_clip_min"]
    bounds = {"low": 0.0 if low is None else number(low), "high": high}
    return Write(
        {"algorithm.correction.weights": {"name": level, **bounds, "outside": "zero" if kind == "mask" else "truncate"}}
    )


def reference(value: Any, options: Options) -> Answer:
    if not truth(options["sync_ref_model"]) or not options.number("beta"):
        return Nothing("the reference never moves")
    return Write(
        {
            "algorithm.reference.update_every_steps": whole(value),
            "algorithm.reference.share": options.number("ref_model_mixup_alpha"),
        }
    )


def warmup_share(value: Any, options: Options) -> Answer:
    steps = options.whole("max_steps")
    return warmup(number(value), steps if steps > 0 else None)


def data(value: Any, options: Options) -> Answer:
    return Write(
        {"data.train": [{"path": f"hf://datasets/{text(value)}"}]}, "a data set of the hub; or a file or a folder"
    )


def rest(options: Options, fields: Mapping[str, Any]) -> Mapping[str, tuple[Any, str]]:
    longest = 1024 + options.whole("max_completion_length")
    found: dict[str, tuple[Any, str]] = {
        "cluster.device": ("cuda", "it runs on GPUs"),
        "rollout.engine": ("sglang", "what samples on GPUs"),
        "rollout.sglang.enable_memory_saver": (True, "engines give their memory back while training"),
        "train.tokens_per_microbatch": microbatches(longest),
        "data.prompt_tokens_max": (1024, "no limit there; choose one"),
    }
    if "data.train" not in fields:
        found["data.train"] = ([{"path": "data/train.parquet"}], "a place for your data: prompts with ground truths")
    if "reward.functions" not in fields:
        found["reward.functions"] = ([{"function": "rewards.py:reward"}], "a place for your reward function")
    if "model.path" not in fields:
        found["model.path"] = ("models/POLICY", "a place for your model")
    return found


TABLE: Table = {
    "model_name_or_path": to("model.path", text),
    "model": to("model.path", text),
    "dataset_name": Row(data, "data.train"),
    "train_dataset": missing("give files in data.train: docs/data.md says which columns"),
    "eval_dataset": missing("give files in eval.sets"),
    "reward_funcs": missing(
        "reward.functions: FILE.py:FUNCTION of one response, with other parameters: docs/rewards.md"
    ),
    "peft_config": missing("give train.lora its rank, alpha and targets"),
    "reward_weights": missing("give reward.functions.0.weight"),
    "num_processes": together("train.layout.data", 1),
    "per_device_train_batch_size": Row(
        prompts,
        "rollout.prompts_per_step",
        8,
        "responses on each device there: x devices x accumulation / num_generations",
    ),
    "gradient_accumulation_steps": Row(updates, "algorithm.minibatches", 1),
    "generation_batch_size": together("rollout.prompts_per_step", None),
    "steps_per_generation": together("algorithm.minibatches", None),
    "num_generations": to("rollout.samples_per_prompt", whole, 8),
    "num_generations_eval": to("eval.samples_per_prompt", whole, off=(None,)),
    "num_iterations": to("algorithm.epochs", whole, 1),
    "max_completion_length": to("rollout.response_tokens_max", whole, 512, "1,024 here unless given"),
    "max_prompt_length": to("data.prompt_tokens_max", whole, off=(None,)),
    "temperature": to("rollout.temperature", number, 1.0),
    "top_p": to("rollout.top_p", number, 1.0, "1 in training: the trainer does not renormalise over a nucleus"),
    "top_k": to("rollout.top_k", lambda value: max(0, whole(value or 0)), 0, "0 for all; 0 in training"),
    "min_p": missing("training samples from the whole distribution"),
    "repetition_penalty": missing("training samples from the whole distribution", (*OFF, 1.0)),
    "generation_kwargs": missing("training samples from the whole distribution"),
    "shuffle_dataset": to("data.shuffle", truth, True),
    "chat_template_kwargs": to("data.chat_template_arguments", lambda value: value, off=(None,)),
    "seed": to("seed", whole, 42),
    "data_seed": always("one seed for all"),
    "beta": to("algorithm.kl.coefficient", number, 0.0, "k3 in both"),
    "epsilon": Row(clip_low, "algorithm.loss.clip_low", 0.2),
    "epsilon_high": Row(
        clip_high, "algorithm.loss.clip_high", None, "with cispo the bound of the weight itself there: less 1"
    ),
    "delta": to("algorithm.loss.dual_clip", number, off=(None,), said="of negative advantages"),
    "loss_type": Row(loss, "algorithm.aggregation", "dapo", "with the loss"),
    "importance_sampling_level": Row(
        lambda value, _: Together() if value in ("token", "sequence") else Missing("token or sequence"),
        "algorithm.loss.name",
        "token",
        "sequence is loss: gspo",
    ),
    "scale_rewards": Row(scaled, "algorithm.advantage.standard_deviation", "group", "epsilon is 1e-4 there"),
    "multi_objective_aggregation": chosen(
        "algorithm.advantage.name",
        {"sum_then_normalize": "grpo", "normalize_then_sum": "gdpo"},
        "grpo or gdpo",
        "sum_then_normalize",
    ),
    "sapo_temperature_pos": Row(
        lambda value, options: (
            Write({"algorithm.loss.temperature_positive": number(value)})
            if options["loss_type"] == "sapo"
            else Nothing("only sapo reads it")
        ),
        "algorithm.loss.temperature_positive",
    ),
    "sapo_temperature_neg": Row(
        lambda value, options: (
            Write({"algorithm.loss.temperature_negative": number(value)})
            if options["loss_type"] == "sapo"
            else Nothing("only sapo reads it")
        ),
        "algorithm.loss.temperature_negative",
    ),
    "vespo_*": always("only vespo reads it"),
    "mask_truncated_completions": Row(
        lambda value, _: Write({"reward.truncated": "mask"}) if truth(value) else Nothing("scored, as here"),
        "reward.truncated",
        said="masked ones are in no group's statistics here",
    ),
    "sync_ref_model": together("algorithm.reference", False),
    "ref_model_sync_steps": Row(reference, "algorithm.reference.update_every_steps", 512, "optimizer steps there"),
    "ref_model_mixup_alpha": together("algorithm.reference.share", 0.6),
    "top_entropy_quantile": missing("clip_cov and kl_cov choose tokens; all others train on all", (*OFF, 1.0)),
    "entropy_coef": to("algorithm.entropy_coefficient", number, 0.0),
    "use_adaptive_entropy": missing("the entropy's coefficient is fixed"),
    "entropy_*": always("use_adaptive_entropy counts"),
    "use_vllm": always("engines are SGLang's servers", ""),
    "vllm_mode": chosen(
        "cluster.placement", {"colocate": "colocated", "server": "disaggregated"}, "colocate or server", "colocate"
    ),
    "vllm_tensor_parallel_size": to("rollout.layout.tensor", whole, 1),
    "vllm_gpu_memory_utilization": to("rollout.sglang.mem_fraction_static", lambda value: float(number(value)), 0.3),
    "vllm_importance_sampling_correction": together(
        "algorithm.correction.weights",
        True,
        "on there with vLLM, off here unless given",
    ),
    "vllm_importance_sampling_mode": Row(importance, "algorithm.correction.weights", "sequence_mask"),
    "vllm_importance_sampling_clip_max": together("algorithm.correction.weights.high", 3.0),
    "vllm_importance_sampling_clip_min": together("algorithm.correction.weights.low", None),
    "vllm_*": missing("give arguments of SGLang's servers in rollout.sglang"),
    "off_policy_mask_threshold": missing("algorithm.correction.reject leaves responses out"),
    "use_bias_correction_kl": missing("algorithm.kl.straight_through has the gradient of k2"),
    "max_tool_calling_iterations": missing("tools are an agent here: docs/agents.md"),
    "tools": missing("tools are an agent here: docs/agents.md"),
    "learning_rate": to("train.optimizer.lr", number, 1e-6),
    "lr_scheduler_type": chosen(
        "train.optimizer.schedule",
        {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"},
        "constant, linear or cosine",
        "linear",
        "linear to 0 there unless given",
    ),
    "warmup_steps": to("train.optimizer.warmup_steps", whole, 0),
    "warmup_ratio": Row(warmup_share, "train.optimizer.warmup_steps"),
    "weight_decay": to("train.optimizer.weight_decay", number, 0.0),
    "adam_beta1": to("train.optimizer.beta1", number, 0.9),
    "adam_beta2": to("train.optimizer.beta2", number, 0.999, "0.95 here unless given"),
    "adam_epsilon": to("train.optimizer.epsilon", number, 1e-8),
    "max_grad_norm": to("train.optimizer.clip_grad", number, 1.0),
    "optim": missing("Adam with decoupled weight decay", (*OFF, "adamw_torch", "adamw_torch_fused")),
    "num_train_epochs": Row(epochs, "train.total_epochs", 3.0),
    "max_steps": Row(total, "train.total_steps", -1),
    "gradient_checkpointing": Row(
        lambda value, _: Write({"train.recompute": FULL_RECOMPUTE}) if truth(value) else Nothing("none, as here"),
        "train.recompute",
        True,
    ),
    "bf16": always("bfloat16 on GPUs; model.dtype"),
    "fp16": missing("bfloat16 or float32"),
    "deepspeed": missing("Megatron-Core splits the policy by train.layout"),
    "fsdp": missing("Megatron-Core splits the policy by train.layout"),
    "use_liger_kernel": missing("kernels are Megatron's and Transformer Engine's"),
    "ds3_gather_for_generation": always("weights are sent in exact shards"),
    "cast_lm_head_to_fp32": always("logprobs are computed in float32"),
    "disable_dropout": always("there is none"),
    "trust_remote_code": missing("code of models is never run"),
    "model_init_kwargs": missing("model.dtype, and train.layer_spec"),
    "attn_implementation": always("Transformer Engine chooses; train.layer_spec says which layers"),
    "dtype": chosen("model.dtype", {"bfloat16": {}, "auto": {}, "float32": "float32"}, "bfloat16 or float32"),
    "torch_dtype": chosen("model.dtype", {"bfloat16": {}, "auto": {}, "float32": "float32"}, "bfloat16 or float32"),
    "use_peft": together("train.lora", False),
    "lora_r": to("train.lora.rank", whole),
    "lora_alpha": to("train.lora.alpha", number),
    "lora_target_modules": to("train.lora.targets", texts),
    "lora_*": missing("adapters have a rank, alpha and targets"),
    "output_dir": to("track.directory", text),
    "run_name": to("name", run_name),
    "save_steps": to("checkpoint.every_steps", whole, said="optimizer steps there"),
    "save_strategy": missing("every_steps", (*OFF, "steps")),
    "save_total_limit": kept(),
    "eval_steps": to("eval.every_steps", whole, off=(None,)),
    "eval_strategy": missing("eval.every_steps, of eval.sets", (*OFF, "no")),
    "do_eval": always("eval.sets counts"),
    "logging_steps": always("every step is logged"),
    "logging_*": always("every step is logged"),
    "log_completions": always("samples are kept in rollouts/ of the run's directory"),
    "num_completions_to_print": always("samples are kept in rollouts/ of the run's directory"),
    "log_unique_prompts": always("samples are kept in rollouts/ of the run's directory"),
    "report_to": Row(
        lambda value, _: (
            Write({"track.wandb.project": "trl"}) if "wandb" in texts(value) else Nothing("MLflow and files are on")
        ),
        "track",
    ),
    "push_to_hub": missing("checkpoint.after_export starts a command for each exported model"),
    "remove_unused_columns": always("all columns of a row reach its reward"),
    "dataloader_*": always("rows are read once, and kept"),
    "per_device_eval_batch_size": always("all held-out prompts are given to the engines at once"),
    "ddp_*": always("Megatron's own"),
}
TRL = Framework("trl", "TRL", TABLE, rest)
