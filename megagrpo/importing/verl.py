"""The answers that rows of verl.yaml compute from several of verl's options."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megagrpo.importing.options import NotKnownError, Options, number, picked, set_name, text, texts, truth, whole
from megagrpo.importing.rows import Answer, Missing, Nothing, Write, microbatches, ranks_of, recomputed, warmup

ACTOR, ROLLOUT, MEGATRON = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.actor.megatron"
TRANSFORMER = f"{MEGATRON}.override_transformer_config"
REWARDS: dict[str, list[dict[str, Any]]] = {
    "openai/gsm8k": [{"function": "gsm8k"}],
    "lighteval/MATH": [{"function": "strict_math"}],
    "DigitalLearningGmbH/MATH-lighteval": [{"function": "strict_math"}],
    "HuggingFaceH4/MATH-500": [{"function": "strict_math"}],
    "math*": [{"function": "math"}],
    "aime*": [{"function": "math"}],
    "numina_*": [{"function": "math"}],
    "searchR1_*": [{"function": "search_answer"}],
}
"""Functions that verl's default_compute_score chooses by a row's data_source, except for programs and images."""
ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
ENGINES_HERE = {"sglang": "sglang", "hf": "transformers"}
"""Engines that sample, by verl's name; all others become vLLM."""
ENGINES = {"megatron": "constant", "veomni": "cosine", "torchtitan": "linear", "fsdp": "constant"}
"""verl's training engines, each with its schedule if none is given."""
SCHEDULES = ("lr_scheduler_type", "lr_decay_style", "decay_type", "warmup_style")
LOSSES = {
    "vanilla": "ppo_clip",
    "gspo": "gspo",
    "cispo": "cispo",
    "sapo": "sapo",
    "geo_mean": "gmpo",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
    "gpg": "reinforce",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
}
RULES_OF_LEVELS = {
    "token": {"level": "token"},
    "seq_sum": {"level": "sequence", "over": "sum"},
    "seq_mean": {"level": "sequence", "over": "mean"},
    "seq_max": {"level": "sequence", "over": "max"},
}
"""Rejections here, by the beginning of their names there."""
MICROBATCH_TOKENS = 16384
"""Most tokens of a microbatch that is given in responses: results do not depend on it, memory does."""
OWN_FILES = ("ppo_trainer", "ppo_megatron_trainer", "ppo_veomni_trainer", "ppo_torchtitan_trainer")
"""Configurations of verl's trainer, whose defaults are known here."""


def longest(options: Options) -> int:
    return options.whole("data.max_prompt_length") + options.whole("data.max_response_length")


def in_loss(options: Options) -> bool:
    return options.true(f"{ACTOR}.use_kl_loss") and options.number(f"{ACTOR}.kl_loss_coef") > 0


def in_reward(options: Options) -> bool:
    used, coefficient = options.true("algorithm.use_kl_in_reward"), options.number("algorithm.kl_ctrl.kl_coef")
    return used and coefficient > 0 and not in_loss(options)


def has_reference(options: Options) -> bool:
    return in_loss(options) or in_reward(options)


def trained_by(options: Options) -> str:
    """Returns the engine of ENGINES that trains in verl."""
    named = [str(options[name]) for name in ("model_engine", f"{ACTOR}.strategy", "--config-name") if name in options]
    engine = next((name for name in ENGINES if any(name in one for one in named)), "")
    has_megatron = any(name.startswith(f"{MEGATRON}.") for name in options.given)
    return engine or ("megatron" if has_megatron else "fsdp")


def schedule(options: Options) -> Any:
    """Returns the schedule of the learning rate, by verl's name."""
    given = [options[f"{ACTOR}.optim.{name}"] for name in SCHEDULES if f"{ACTOR}.optim.{name}" in options]
    return next((one for one in given if one is not None), ENGINES[trained_by(options)])


def loss(options: Options) -> str:
    """Returns the policy's loss, by verl's name."""
    correction = "algorithm.rollout_correction"
    if truth(options[f"{correction}.bypass_mode"]) and options[f"{correction}.loss_type"] == "reinforce":
        return "gpg"
    named = options[f"{ACTOR}.policy_loss.loss_mode"]
    return "vanilla" if named == "bypass_mode" else str(named)


def loss_mode(value: Any, options: Options) -> Answer:
    if loss(options) == "gpg" and value != "gpg":
        return Nothing("rollout_correction.loss_type counts")
    name = picked(LOSSES, loss(options))
    listed = "losses here are listed in docs/algorithms.md; one of your own is algorithm.loss: FILE.py:FUNCTION"
    return Missing(listed) if name is None else Write({"algorithm.loss.name": name})


def kl_loss_type(value: Any, options: Options) -> Answer:
    if text(value) in ("kl", "k1"):
        return Missing("k1 has no gradient in expectation as a term of the loss; the recipe has k3")
    return kl_penalty(value, options)


def kl_penalty(value: Any, _: Options) -> Answer:
    name = text(value)
    estimator = ESTIMATORS.get(name.rstrip("+"))
    if estimator is None:
        return Missing(f"estimators here are {', '.join(sorted({*ESTIMATORS.values()}))}")
    through = {"algorithm.kl.straight_through": True} if name.endswith("+") else {}
    return Write({"algorithm.kl.estimator": estimator, **through})


def kl_in_reward(value: Any, options: Options) -> Answer:
    if truth(value) and in_loss(options):
        return Missing("the penalty has one place here: it is in the loss; or write algorithm.kl.placement: reward")
    return Write({"algorithm.kl.placement": "reward"}) if in_reward(options) else Nothing("no penalty in the reward")


def minibatches(value: Any, options: Options) -> Answer:
    batch, mini = options.whole("data.train_batch_size"), whole(value)
    if batch % mini:
        return Missing(f"{batch} prompts are no multiple of {mini}: minibatches have equal sizes here")
    return Write({"algorithm.minibatches": batch // mini})


def tokens_of_microbatch(value: Any, options: Options) -> Answer:
    return Write({"train.tokens_per_microbatch": max(whole(value), -(-longest(options) // context(options)))})


def responses_of_microbatch(value: Any, options: Options) -> Answer:
    most = longest(options)
    tokens = max(most, min(most * whole(value), MICROBATCH_TOKENS))
    note = f"microbatches are counted in tokens here, not in responses: {tokens}; results do not depend on it"
    return Write({"train.tokens_per_microbatch": -(-tokens // context(options))}, note)


def logprob_tokens(value: Any, options: Options) -> Answer:
    minibatches = options.whole("data.train_batch_size") // options.whole(f"{ACTOR}.ppo_mini_batch_size")
    updates = minibatches * options.whole(f"{ACTOR}.ppo_epochs")
    if not options.true(f"{ACTOR}.use_dynamic_bsz") or not (has_reference(options) or updates > 1):
        return Nothing("it would have no effect")
    trained = max(options.whole(f"{ACTOR}.ppo_max_token_len_per_gpu"), -(-longest(options) // context(options)))
    several = whole(value) // trained
    if several < 2:
        return Nothing("as many as with gradients, as here")
    return Write({"train.logprob_tokens_per_microbatch": several * trained})


def context(options: Options) -> int:
    match trained_by(options):
        case "megatron":
            return options.whole(f"{MEGATRON}.context_parallel_size")
        case "veomni":
            return options.whole(f"{ACTOR}.veomni.ulysses_parallel_size")
        case "torchtitan":
            return options.whole(f"{ACTOR}.torchtitan.context_parallel_size")
    ulysses = options.whole(f"{ACTOR}.ulysses_sequence_parallel_size")
    return ulysses if ulysses > 1 else options.whole(f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size")


def nodes(value: Any, options: Options) -> Answer:
    sizes, engine_name = {"context": context(options)}, trained_by(options)
    if engine_name == "megatron":
        sizes["tensor"] = options.whole(f"{MEGATRON}.tensor_model_parallel_size")
        sizes["pipeline"] = options.whole(f"{MEGATRON}.pipeline_model_parallel_size")
    elif engine_name == "torchtitan":
        sizes["tensor"] = options.whole(f"{ACTOR}.torchtitan.tensor_parallel_size")
        sizes["pipeline"] = options.whole(f"{ACTOR}.torchtitan.pipeline_parallel_size")
    engine = options.whole(f"{ROLLOUT}.tensor_model_parallel_size")
    gpus = options.whole("trainer.nnodes") * options.whole("trainer.n_gpus_per_node")
    layout = ranks_of(gpus, sizes, engine)
    if not isinstance(layout, Write):
        return layout
    source = f"{gpus} GPUs: trainer.nnodes x trainer.n_gpus_per_node"
    if engine_name == "megatron":
        return Write(layout.fields, source=source)
    note = (
        "verl's FSDP splits the weights over all GPUs; here every data rank has them whole, unless tensor or pipeline "
        "split them: `megagrpo plan RECIPE --search` finds a layout that fits"
    )
    return Write(layout.fields, note, source)


def sampled_by(options: Options) -> str:
    """Returns the engine that samples, by its name here."""
    return ENGINES_HERE.get(str(options[f"{ROLLOUT}.name"]), "vllm")


def engine(value: Any, options: Options) -> Answer:
    name = text(value)
    there = f"verl samples with {name}; here vLLM does: give its arguments in rollout.vllm"
    return Write({"rollout.engine": sampled_by(options)}, "" if name in ("vllm", *ENGINES_HERE) else there)


def memory_share(value: Any, options: Options) -> Answer:
    share = float(number(value))
    if sampled_by(options) == "vllm":
        return Write({"rollout.vllm.gpu_memory_utilization": share})
    note = "SGLang's share is of weights and keys and values together; lower it if `megagrpo plan` says it does not fit"
    return Write({"rollout.sglang.mem_fraction_static": share}, note)


def eager(_: Any, options: Options) -> Answer:
    name = "vllm.enforce_eager" if sampled_by(options) == "vllm" else "sglang.disable_cuda_graph"
    return Write({f"rollout.{name}": True})


def train_files(value: Any, options: Options) -> Answer:
    return Write({"data.train": entries(texts(value), "data.train_max_samples", options)})


def val_files(value: Any, options: Options) -> Answer:
    if options.whole("trainer.test_freq") <= 0 and not options.true("trainer.val_before_train"):
        return Nothing("it never evaluates: test_freq and val_before_train are off")
    sets: dict[str, list[str]] = {}
    for file in texts(value):
        sets.setdefault(set_name(file), []).append(file)
    amount = "data.val_max_samples"
    named = {name: {"files": entries(files, amount, options)} for name, files in sets.items()}
    return Write({"eval.sets": named})


def entries(paths: Sequence[str], amount: str, options: Options) -> list[dict[str, Any]]:
    """Returns entries of data.train, or of a set's files. amount: the option of their rows; None, 0 or below: all."""
    prompt, source, rows = text(options["data.prompt_key"]), text(options["data.reward_fn_key"]), options[amount]
    columns = {"prompt": prompt} if prompt != "prompt" else {}
    columns |= {"data_source": source} if source != "data_source" else {}
    limited = rows is not None and (isinstance(rows, float) or whole(rows) > 0)
    more = ({"columns": columns} if columns else {}) | ({"amount": rows} if limited else {})
    return [{"path": path, **more} for path in paths]


def greedy(value: Any, options: Options) -> Answer:
    if truth(value) or options.number(f"{ROLLOUT}.val_kwargs.temperature") == 0:
        return Nothing("val_kwargs.temperature counts, as there")
    return Missing("engines sample at val_kwargs.temperature there; greedy is eval.temperature: 0")


def evaluated_each(value: Any, options: Options) -> Answer:
    every = whole(value)
    if every > 0:
        return Write({"eval.every_steps": every})
    if not options.true("trainer.val_before_train"):
        return Nothing("it never evaluates: without eval.sets, as here")
    return Write(
        {"eval.every_steps": 10**9}, "verl evaluates before training only; here the last step is evaluated, too"
    )


def save_contents(value: Any, _: Options) -> Answer:
    if "optimizer" in texts(value):
        return Nothing("weights, optimizer and generators are saved; a Hugging Face model at the end")
    return Missing("checkpoints are whole here, so that a run can continue")


def warmup_share(value: Any, options: Options) -> Answer:
    given = options[f"{ACTOR}.optim.lr_warmup_steps"]
    if number(value) == 0 or (given is not None and whole(given) >= 0):
        return Nothing("lr_warmup_steps is given, or there is no warm-up")
    return warmup(number(value), options["trainer.total_training_steps"])


def least_rate(value: Any, options: Options) -> Answer:
    return Write({"train.optimizer.min_lr": number(value) * options.number(f"{ACTOR}.optim.lr")})


def rounds(value: Any, options: Options) -> Answer:
    most = options.whole("algorithm.filter_groups.max_num_gen_batches")
    return Write({"rollout.dynamic_sampling.rounds_max": most if most > 0 else 10**6})


def betas(value: Any, options: Options) -> Answer:
    if not isinstance(value, list) or len(value) != 2:
        raise NotKnownError(f"{value!r} is no pair of numbers")
    return Write({"train.optimizer.beta1": number(value[0]), "train.optimizer.beta2": number(value[1])})


def loggers(value: Any, options: Options) -> Answer:
    project, fields, others = text(options["trainer.project_name"]), dict[str, Any](), list[str]()
    for name in texts(value):
        if name == "wandb":
            fields["track.wandb.project"] = project
        elif name == "mlflow":
            fields["track.mlflow.experiment"] = project
        elif name == "tensorboard":
            fields["track.tensorboard"] = True
        elif name not in ("console", "file"):
            others.append(name)
    if others and not fields:
        return Missing(f"trackers here are MLflow, W&B, TensorBoard and files, not {', '.join(others)}")
    if not fields:
        return Nothing("console, files and MLflow are always there, as track says")
    return Write(fields, f"no counterpart to {', '.join(others)}" if others else "")


def reward_file(value: Any, options: Options) -> Answer:
    named = [f"{prefix}custom_reward_function.name" for prefix in ("reward.", "")]
    name = next((options[one] for one in named if one in options), "compute_score")
    return Write({"reward.functions": [{"function": f"{text(value)}:{text(name)}"}]})


def length_in_penalty(value: Any, options: Options) -> Answer:
    if value is None or whole(value) == options.whole("data.max_response_length"):
        return Nothing("rollout.response_tokens_max counts, which it is")
    below = whole(value) - (options.whole("data.max_response_length"))
    return Missing(
        f"the penalty begins below rollout.response_tokens_max here: {abs(below)} tokens "
        f"{'earlier' if below < 0 else 'later'} there"
    )


def own_file(value: Any, _: Options) -> Answer:
    if str(value).removesuffix(".yaml") in OWN_FILES:
        return Nothing("defaults of verl's own files are known here")
    return Missing("options of other files are not read: print the whole by `--cfg job --resolve`, and give that")


def has_adapters(options: Options) -> bool:
    return bool(options["actor_rollout_ref.model.lora_rank"] or options["actor_rollout_ref.model.lora.rank"])


def has_overlong_penalty(options: Options) -> bool:
    kinds = ("reward_model", "reward")
    switches = [options[f"{kind}.reward_kwargs.overlong_buffer_cfg.enable"] for kind in kinds]
    return any(truth(switch) for switch in switches if switch is not None)


def lora_targets(value: Any, options: Options) -> Answer:
    fused = {"linear_qkv": ["q_proj", "k_proj", "v_proj"], "linear_proj": ["o_proj"]}
    fused |= {"linear_fc1": ["gate_proj", "up_proj"], "linear_fc2": ["down_proj"]}
    return Write({"train.lora.targets": [one for name in texts(value) for one in fused.get(name, [name])]})


def importance(value: Any, options: Options) -> Answer:
    low, high = thresholds(options["algorithm.rollout_correction.rollout_is_threshold"])
    more: dict[str, Any] = {} if low is None else {"low": low, "outside": "zero"}
    if options.true("algorithm.rollout_correction.rollout_is_batch_normalize"):
        more["normalize"] = True
    return Write({"algorithm.correction.weights": {"name": text(value), "high": high, **more}})


def thresholds(value: Any) -> tuple[float | None, float]:
    """Returns the bounds of `upper` or `lower_upper`. Raises NotKnownError."""
    try:
        numbers = [float(part) for part in text(value).split("_")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or min(numbers) <= 0:
        raise NotKnownError(f"{value!r} is neither one bound nor lower_upper")
    return (numbers[0] if len(numbers) == 2 else None), numbers[-1]


def rejections(value: Any, options: Options) -> Answer:
    names = [name.strip() for name in text(value).split(",")]
    bounds = text(options["algorithm.rollout_correction.rollout_rs_threshold"]).split(",")
    if len(bounds) not in (1, len(names)):
        raise NotKnownError(f"{len(bounds)} thresholds for {len(names)} rejections")
    rules: list[dict[str, Any]] = []
    for name, bound in zip(names, bounds * (len(names) // len(bounds)), strict=True):
        level, _, statistic = name.rpartition("_")
        low, high = thresholds(bound.strip())
        rule = picked(RULES_OF_LEVELS, level)
        if rule is None or statistic not in ("k1", "k2", "k3"):
            return Missing(f"{name} has no counterpart: see algorithm.correction.reject")
        if statistic == "k1":  # between bounds of a ratio there, of its logarithm here
            rules.append({**rule, "statistic": "k1", "low": math.log(low or 1 / high), "high": math.log(high)})
        else:
            rules.append({**rule, "statistic": statistic, "high": high})
    return Write({"algorithm.correction.reject": rules})


def recompute(value: Any, options: Options) -> Answer:
    return recomputed(value, options, f"{TRANSFORMER}.")


def teachers(value: Any, options: Options) -> Answer:
    """Returns servers by the names of teacher_models, or the only one of teacher_model; its key says for which rows."""
    found, by_source, replicas = dict[str, dict[str, Any]](), dict[str, str](), 1
    named = re.compile(r"distillation\.teacher_model(s\.[^.]+)?\.model_path")
    paths = [name for name in options.given if named.fullmatch(name)]
    for path in paths:
        above = path.removesuffix(".model_path")
        name = set_name(above.rpartition(".")[2])
        engine = options[f"{above}.inference.name"] or options[f"{ROLLOUT}.name"]
        server = {"kind": "server", "engine": "sglang" if engine == "sglang" else "vllm", "path": text(options[path])}
        found[name] = server | {"devices": whole(options[f"{above}.inference.tensor_model_parallel_size"] or 2)}
        replicas = max(replicas, whole(options[f"{above}.num_replicas"] or 1))
        if (key := options[f"{above}.key"]) is not None and len(paths) > 1:
            by_source[text(key)] = name
    if not found:
        return Missing("no model: give distillation.teacher_models.teacher_model.model_path")
    fields = {"teachers": found, **({"algorithm.distillation.by_source": by_source} if by_source else {})}
    return Write(fields, "a teacher has one server here, of `devices` devices" if replicas > 1 else "")


def objective(value: Any, options: Options) -> Answer:
    name, section = text(value), "algorithm.distillation.objective"
    by_gradient = options.true("distillation.distillation_loss.use_policy_gradient")
    if name in ("forward_kl_topk", "forward_kl_topk_tail") and not by_gradient:
        k = options.whole("distillation.distillation_loss.topk")
        note = "" if name.endswith("tail") else "all other ids are one event here, and are left out there"
        return Write({section: {"name": "teacher_top_k", "k": k, "divergence": "forward_kl"}}, note)
    if name in ("kl", "k1") and by_gradient:
        return Write({section: "sampled_token"})
    return Missing(
        "divergences of distributions are in the loss, sampled_token in the advantages: docs/distillation.md"
    )


def rewarded(options: Options) -> bool:
    names = ("use_task_rewards", "use_policy_loss")
    rewards = [options.true(f"distillation.distillation_loss.{name}") for name in names]
    return not options.true("distillation.enabled") or all(rewards)


def rest(options: Options, fields: Mapping[str, Any]) -> Mapping[str, tuple[Any, str]]:
    more: dict[str, tuple[Any, str]] = {
        "cluster.device": ("cuda", "verl runs on GPUs"),
        "rollout.engine": ("vllm", "what samples on GPUs"),
    }
    if fields.get("rollout.engine") == "sglang":
        more["rollout.sglang.enable_memory_saver"] = (True, "engines give their memory back while training")
    if "reward.functions" not in fields and rewarded(options):
        more["reward.by_source"] = (REWARDS, "what verl's default_compute_score chooses by data_source")
    if ENGINES[trained_by(options)] != "constant":
        more["train.optimizer.schedule"] = (ENGINES[trained_by(options)], f"{trained_by(options)}'s default there")
    tokens = fields.get("train.tokens_per_microbatch")
    if tokens is None:
        least = -(-longest(options) // context(options))
        more["train.tokens_per_microbatch"] = microbatches(least)
    return more
