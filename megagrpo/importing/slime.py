"""The answers that rows of slime.yaml compute from several options of slime's train.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megagrpo.importing.options import NotKnownError, Options, number, set_name, text, texts, truth, whole
from megagrpo.importing.rows import Answer, Missing, Nothing, Together, Write, microbatches, ranks_of, recomputed


def longest(options: Options) -> int:
    return options.whole("rollout_max_prompt_len") + options.whole("rollout_max_response_len")


def nodes(value: Any, options: Options) -> Answer:
    axes = ("tensor", "pipeline", "context")
    sizes = {axis: options.whole(f"{axis}_model_parallel_size".replace("context_model", "context")) for axis in axes}
    engine, others = options.whole("rollout_num_gpus_per_engine"), options["rollout_num_gpus"]
    engines = None if truth(options["colocate"]) or others is None else whole(others) // engine
    gpus = options.whole("actor_num_nodes") * options.whole("actor_num_gpus_per_node")
    return ranks_of(gpus, sizes, engine, engines)


def minibatches(value: Any, options: Options) -> Answer:
    samples = options.whole("rollout_batch_size") * options.whole("n_samples_per_prompt")
    if samples % whole(value):
        return Missing(f"{samples} samples are no multiple of {value}: minibatches have equal sizes here")
    return Write({"algorithm.minibatches": samples // whole(value)})


def kl_in_loss(options: Options) -> bool:
    return truth(options["use_kl_loss"]) and options.number("kl_loss_coef") > 0


def kl_in_reward(value: Any, options: Options) -> Answer:
    if kl_in_loss(options):
        return Missing("the penalty has one place here: it is in the loss")
    fields = {"coefficient": number(value), "estimator": "k1", "placement": "reward"}
    return Write({f"algorithm.kl.{name}": part for name, part in fields.items()})


def weights(value: Any, options: Options) -> Answer:
    low, high = options.number("tis_clip_low"), options.number("tis_clip")
    return Write({"algorithm.correction.weights": {"name": "token", "low": low, "high": high}})


def prompts(value: Any, options: Options) -> Answer:
    return Write({"data.train": [{"path": path, **columns(options)} for path in texts(value)]})


def columns(options: Options) -> dict[str, Any]:
    prompt, label = text(options["input_key"]), options["label_key"]
    prompts = {"prompt": prompt} if prompt != "prompt" else {}
    truths = {"ground_truth": text(label)} if label not in (None, "ground_truth") else {}
    return {"columns": {**prompts, **truths, "data_source": {"value": "slime"}}}


def held_out(value: Any, options: Options) -> Answer:
    listed = texts(value)
    if len(listed) % 2:
        raise NotKnownError(f"{value!r} is no list of names, each with its file")
    pairs = zip(listed[::2], listed[1::2], strict=True)
    return Write(
        {"eval.sets": {set_name(name): {"files": [{"path": path, **columns(options)}]} for name, path in pairs}}
    )


def microbatch(value: Any, options: Options) -> Answer:
    least = -(-longest(options) // options.whole("context_parallel_size"))
    return Write({"train.tokens_per_microbatch": max(whole(value), least)})


def partial(value: Any, options: Options) -> Answer:
    more = options.whole("over_sampling_batch_size") - options.whole("rollout_batch_size")
    if more <= 0:
        return Nothing("over_sampling_batch_size is no larger than rollout_batch_size")
    return Write({"schedule.kind": "sync", "schedule.carry_over": more, "schedule.max_staleness": 2})


def recompute(value: Any, options: Options) -> Answer:
    return recomputed(value, options)


def resampled(_: Any, __: Options) -> Answer:
    return Write({"rollout.dynamic_sampling.rounds_max": 4})


def teacher(value: Any, options: Options) -> Answer:
    """Returns the teacher of --opd-type: a server at --rm-url, or weights on the ranks."""
    kind = options["opd_type"]
    if kind == "sglang":
        url, tokenizer = text(options["rm_url"]).removesuffix("/generate"), text(options["hf_checkpoint"])
        note = "teachers.teacher.tokenizer is the student's: write the path of the server's model, to compare the two"
        return Write({"teachers": {"teacher": {"kind": "external", "url": url, "tokenizer": tokenizer}}}, note)
    if kind == "megatron":
        path, note = text(options["opd_teacher_load"]), "a Hugging Face directory here: `megagrpo convert`"
        return Write({"teachers": {"teacher": {"kind": "ranks", "path": path}}}, note)
    return Missing("the policy's start is a teacher of kind: reference; distillation.system gives it more to read")


def server(value: Any, options: Options) -> Answer:
    return Together() if truth(options["use_opd"]) else Missing("function: remote asks a server")


def tracking(value: Any, options: Options) -> Answer:
    return Write({"track.wandb.project": text(options["wandb_project"] or "slime")})


def rest(options: Options, fields: Mapping[str, Any]) -> Mapping[str, tuple[Any, str]]:
    more: dict[str, tuple[Any, str]] = {
        "rollout.engine": ("sglang", "engines are SGLang's in both"),
        "cluster.device": ("cuda", "it runs on GPUs"),
    }
    if truth(options["colocate"]):
        more["rollout.sglang.enable_memory_saver"] = (True, "engines give their memory back while training")
        more["train.offload"] = (["gradients", "optimizer"], "colocate moves them away while engines sample")
    else:
        more["cluster.placement"] = ("disaggregated", "without --colocate engines have GPUs of their own")
    if "train.tokens_per_microbatch" not in fields:
        more["train.tokens_per_microbatch"] = microbatches(longest(options))
    if any(path.startswith("eval.") for path in fields) and "eval.temperature" not in fields:
        more["eval.temperature"] = (options.number("rollout_temperature"), "evaluation samples as training does")
    return more
