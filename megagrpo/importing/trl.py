"""TRL's GRPO: how a Python file with GRPOConfig(...) is read, and the answers that rows of trl.yaml compute."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megagrpo.errors import Problem, RecipeError
from megagrpo.importing.options import Given, Options, number, picked, read_text, text, texts, whole
from megagrpo.importing.rows import Answer, Missing, Nothing, Write, microbatches, warmup
from megagrpo.importing.shell_words import UNKNOWN

PYTHON_OBJECTS = ("train_dataset", "eval_dataset", "reward_funcs", "peft_config", "processing_class")
"""Arguments of GRPOTrainer that no recipe can hold."""
REWARD = {"reward.functions": ([{"function": "rewards.py:reward"}], "a place for your reward function")}
CONFIGS = ("GRPOConfig", "GKDConfig")
GKD = {"num_generations": 1, "temperature": 0.9, "max_new_tokens": 128, "lmbda": 0.5}
"""GKDConfig's defaults, where they differ from GRPOConfig's or have no counterpart."""
LOSSES = {
    "grpo": ("ppo_clip", "seq_mean_token_mean"),
    "dapo": ("ppo_clip", "token_mean"),
    "bnpo": ("ppo_clip", "token_mean"),
    "dr_grpo": ("ppo_clip", "seq_mean_token_sum_norm"),
    "cispo": ("cispo", "token_mean"),
    "sapo": ("sapo", "seq_mean_token_mean"),
}
"""Loss and aggregation by loss_type."""


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
        if name == "GKDConfig":
            defaults = {option: Given(option, value, node.lineno) for option, value in GKD.items()}
            given = defaults | given
        for keyword in node.keywords:
            of_trainer = name in ("GRPOTrainer", "GKDTrainer")
            wanted = name in CONFIGS or (of_trainer and keyword.arg in ("model", "teacher_model", *PYTHON_OBJECTS))
            if wanted and keyword.arg:
                is_object = keyword.arg in PYTHON_OBJECTS
                value = ast.unparse(keyword.value) if is_object else _literal(keyword.value)
                option = "GKDConfig.beta" if (name, keyword.arg) == ("GKDConfig", "beta") else keyword.arg
                given[option] = Given(option, value, keyword.value.lineno)
    if not given:
        needed = "a Python file that makes one, or a GKDConfig(...)"
        raise RecipeError(Problem(str(path), "no GRPOConfig(...) with arguments", needed))
    return given


def _literal(node: ast.expr) -> Any:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return UNKNOWN + ast.unparse(node)
    return list(value) if isinstance(value, tuple) else value


def batch(options: Options) -> int:
    """Returns the number of responses of a step, which are generated at once."""
    if options["generation_batch_size"] is not None:
        return options.whole("generation_batch_size")
    return options.whole("per_device_train_batch_size") * options.whole("num_processes") * generations(options)


def generations(options: Options) -> int:
    accumulated = options.whole("gradient_accumulation_steps")
    steps = options["steps_per_generation"]
    return accumulated if steps is None else whole(steps)


def prompts(value: Any, options: Options) -> Answer:
    samples = options.whole("num_generations")
    if batch(options) % samples:
        return Missing(f"{batch(options)} responses are no multiple of {samples}: give rollout.prompts_per_step")
    note = "counted for num_processes processes: add --set num_processes=N to this command if there are others"
    devices, prompts_per_step = options.whole("num_processes"), batch(options) // samples
    fields = {"train.layout.data": devices, "rollout.engines": devices}
    return Write({"rollout.prompts_per_step": prompts_per_step, **fields}, note)


def updates(value: Any, options: Options) -> Answer:
    steps, accumulated = generations(options), options.whole("gradient_accumulation_steps")
    if steps % accumulated:
        return Missing("steps_per_generation is no multiple of gradient_accumulation_steps: give algorithm.minibatches")
    return Write({"algorithm.minibatches": steps // accumulated})


def total(value: Any, options: Options) -> Answer:
    minibatches = max(1, generations(options) // options.whole("gradient_accumulation_steps"))
    updates = minibatches * options.whole("num_iterations")
    if whole(value) <= 0:
        return Nothing("num_train_epochs counts")
    return Write(
        {"train.total_steps": -(-whole(value) // updates)}, "optimizer steps there, steps with new samples here"
    )


def epochs(value: Any, options: Options) -> Answer:
    if options.whole("max_steps") > 0:
        return Nothing("max_steps is given, and counts")
    return Write({"train.total_epochs": max(1, round(number(value)))})


def loss(value: Any, options: Options) -> Answer:
    names = picked(LOSSES, value)
    if names is None:
        return Missing("losses here are listed in docs/algorithms.md")
    name, aggregation = names
    by_sequence = options["importance_sampling_level"] == "sequence" and name == "ppo_clip"
    return Write({"algorithm.loss.name": "gspo" if by_sequence else name, "algorithm.aggregation.name": aggregation})


def clip_low(value: Any, options: Options) -> Answer:
    return Write({"algorithm.loss.clip_low": 1 if options["loss_type"] == "cispo" else min(number(value), 1)})


def clip_high(value: Any, options: Options) -> Answer:
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
    level, _, kind = text(value).partition("_")
    high, low = options.number("vllm_importance_sampling_clip_max"), options["vllm_importance_sampling_clip_min"]
    weights = {"name": level, "low": 0.0 if low is None else number(low), "high": high}
    return Write({"algorithm.correction.weights": weights | {"outside": "zero" if kind == "mask" else "truncate"}})


def warmup_share(value: Any, options: Options) -> Answer:
    steps = options.whole("max_steps")
    return warmup(number(value), steps if steps > 0 else None)


def data(value: Any, options: Options) -> Answer:
    files = [{"path": f"hf://datasets/{text(value)}"}]
    return Write({"data.train": files}, "a data set of the hub; or a file or a folder")


def teacher(value: Any, options: Options) -> Answer:
    """Returns GKD's teacher, on the ranks, with the divergence that its beta chooses."""
    beta = options.number("GKDConfig.beta")
    ends = {0: "forward_kl", 1: "reverse_kl"}
    divergence = {"divergence": ends[int(beta)]} if beta in ends else {"divergence": "jsd", "beta": beta}
    objective = {"name": "full_vocabulary", "temperature": 1.0, **divergence}
    teachers = {"teacher": {"kind": "ranks", "path": text(value)}}
    return Write({"teachers": teachers, "algorithm.distillation.objective": objective})


def on_policy(value: Any, _: Options) -> Answer:
    """Returns the given responses that GKD's lmbda leaves, the share of steps with sampled ones."""
    if (share := round(1 - number(value), 6)) <= 0:
        return Nothing("all responses are sampled")
    given = {"share": share, "column": "response"}
    note = "of each step's prompts, there of steps; a column with the texts that are last in messages there"
    return Write({"algorithm.distillation.given_responses": given}, note)


def tracking(value: Any, _: Options) -> Answer:
    return Write({"track.wandb.project": "trl"}) if "wandb" in texts(value) else Nothing("MLflow and files are on")


def rest(options: Options, fields: Mapping[str, Any]) -> Mapping[str, tuple[Any, str]]:
    longest = 1024 + options.whole("max_completion_length")
    saver = "vllm.enable_sleep_mode" if options.true("use_vllm") else "sglang.enable_memory_saver"
    apart = fields.get("cluster.placement") == "disaggregated"
    return {
        "cluster.device": ("cuda", "it runs on GPUs"),
        **({} if apart else {f"rollout.{saver}": (True, "engines give their memory back while training")}),
        "train.tokens_per_microbatch": microbatches(longest),
        "data.prompt_tokens_max": (1024, "no limit there; choose one"),
        "data.train": ([{"path": "data/train.parquet"}], "a place for your data: prompts with ground truths"),
        **({} if "teachers" in fields else REWARD),
        "model.path": ("models/POLICY", "a place for your model"),
    }
