"""The answers that rows of open_instruct.yaml compute from several options of open-instruct's grpo_fast.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megagrpo.importing.options import NotKnownError, Options, number, set_name, text, truth, value_of, whole
from megagrpo.importing.rows import Answer, Missing, Nothing, Write, warmup

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


def colocated(options: Options) -> bool:
    return options.true("single_gpu_mode")


def train_ranks(value: Any, options: Options) -> Answer:
    context = options.whole("sequence_parallel_size")
    ranks = sum(map(whole, value)) if isinstance(value, list) else whole(value)
    if ranks % context:
        return Missing(f"{ranks} learners are no multiple of sequence_parallel_size {context}: give train.layout")
    return Write({"train.layout.data": ranks // context})


def amounts(value: Any) -> list[tuple[str, int | float]]:
    listed = value if isinstance(value, list) else [value]
    if len(listed) == 1 and isinstance(listed[0], str):
        listed = listed[0].split()
    if len(listed) % 2:
        raise NotKnownError(f"{value!r} is no list of data sets, each with its amount")
    pairs = zip(listed[::2], listed[1::2], strict=True)
    return [(text(name), number(value_of(str(amount)))) for name, amount in pairs]


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
        "`hf download NAME --repo-type dataset --local-dir DIR` keeps a copy in a folder"
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


def clamp(value: Any, options: Options) -> Answer:
    if not number(value):
        return Missing("weights have an upper bound: algorithm.correction.weights.high")
    low = options.number("rho_clamp_lower_bound")
    return Write({"algorithm.correction.weights": {"name": "token", "low": low, "high": number(value)}})


def mask(value: Any, options: Options) -> Answer:
    low, high = options.number("rho_mask_lower_bound"), options.number("rho_mask_upper_bound")
    if not (low or high):
        return Nothing("nothing is masked")
    level = {"level": "sequence", "over": "mean"} if options.true("rho_mask_sequence_level") else {"level": "token"}
    bounds = ({"low": low} if low else {}) | ({"high": high} if high else {})
    note = "rejected tokens or responses are not in the loss's denominators here; there they count as 0"
    return Write({"algorithm.correction.reject": [{**level, "statistic": "ratio", **bounds}]}, note)


def asynchronous(value: Any, options: Options) -> Answer:
    if colocated(options):
        return Missing("on one GPU engines and trainer take turns: schedule is sync")
    fields: dict[str, Any] = {"schedule.kind": "async", "schedule.max_staleness": whole(value)}
    return Write(fields, "groups that would become older than max_staleness are not begun, so that none is dropped")


def clip_low(value: Any, options: Options) -> Answer:
    return Write({"algorithm.loss.clip_low": 1 if options["loss_fn"] == "cispo" else number(value)})


def warmup_share(value: Any, options: Options) -> Answer:
    steps, share = options["max_train_steps"], number(value)
    if steps is None:
        steps = options.whole("total_episodes") // (
            options.whole("num_unique_prompts_rollout") * options.whole("num_samples_per_prompt_rollout")
        )
    return warmup(share, steps)


def offload(value: Any, options: Options) -> Answer:
    if not colocated(options):
        return Missing("with engines on other devices ranks offload nothing: more data ranks share the optimizer")
    return Write({"train.offload": ["optimizer"]})


def tracking(value: Any, options: Options) -> Answer:
    return Write({"track.wandb.project": text(options["wandb_project"])})


def rest(options: Options, fields: Mapping[str, Any]) -> Mapping[str, tuple[Any, str]]:
    longest = options.whole("max_prompt_token_length") + options.whole("response_length")
    more: dict[str, tuple[Any, str]] = {
        "rollout.engine": ("vllm", "engines are vLLM's in both"),
        "cluster.device": ("cuda", "it runs on GPUs"),
        "train.tokens_per_microbatch": (
            max(longest, options.whole("pack_length")),
            "pack_length or the longest sequence",
        ),
    }
    if "eval.sets" in fields:
        more["eval.temperature"] = (options.number("temperature"), "evaluation samples as training does")
    more["train.optimizer.beta2"] = (0.999, "torch's default of AdamW")
    if colocated(options):
        more["rollout.vllm.enable_sleep_mode"] = (True, "engines give their memory back while training")
    else:
        more["cluster.placement"] = ("disaggregated", "engines have GPUs of their own")
    return more
