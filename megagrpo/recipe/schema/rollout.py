"""rollout: how prompts become samples."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from megagrpo.section import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class EngineLayoutConfig(Section):
    """Parallel sizes of one SGLang engine."""

    tensor: PositiveInt = 1
    """Ranks that share each matrix."""

    expert: PositiveInt = 1
    """Ranks that share the experts of a layer; a divisor of tensor, as in SGLang."""


class SglangConfig(BaseModel):
    """SGLang servers. Every key but `python` is an argument of `sglang.launch_server`, with underscores."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, use_attribute_docstrings=True)

    python: str | None = None
    """Interpreter of another environment that has SGLang; the default is the one that runs megagrpo."""


class MismatchConfig(Section):
    """When the trainer's logprobs of the sampled tokens differ from the engines': what is reported, and what is done.

    Both are compared in every step that trains the policy; `megagrpo report` shows it. With
    algorithm.rollout_logprobs_as_old and several minibatches the trainer's are those of the update itself, so the
    figures also measure how far the policy has moved by then.
    """

    metric: Literal["mean", "p99", "max", "k3"] = "p99"
    """Which figure `above` is for: logprob_difference/METRIC of the metrics table, in nats."""

    above: NonNegativeFloat | None = None
    """Threshold of the metric. null: nothing is done, whatever the difference."""

    then: Literal["warn", "stop"] = "warn"
    """Past the threshold. warn: say so. stop: save a checkpoint of the step, then end the run with an error."""

    worst_tokens: Annotated[int, Field(ge=1, le=256)] = 8
    """Tokens with the largest differences that each step writes to mismatch.jsonl, with their text."""


class DynamicSamplingConfig(Section):
    """Groups that teach nothing, as those whose responses all have the same score, are replaced by those of new prompts
    (DAPO, arXiv:2503.14476, section 3.2).
    """

    rounds_max: PositiveInt = 4
    """How often a step may sample at most, its first time included. Past it the step trains on what it has."""


class RolloutConfig(Section):
    """How responses are generated for training."""

    engine: Literal["transformers", "sglang", "external"] = "transformers"
    """What generates. transformers: embedded, for CPUs and tests. sglang: servers that the run starts and ends.
    external: SGLang servers that somebody else runs, at `urls`."""

    engines: PositiveInt = 1
    """Number of engines; requests are spread over them. With external, the number of `urls`."""

    layout: EngineLayoutConfig = EngineLayoutConfig()
    """How each SGLang engine is split over devices."""

    sglang: SglangConfig = SglangConfig()
    """The SGLang servers that the run starts: an interpreter, and any server argument."""

    urls: list[str] = []
    """Servers of an external engine, such as http://host:30000, one for each engine."""

    api_key_variable: str | None = None
    """Environment variable with the API key of external servers."""

    prompts_per_step: PositiveInt
    """Prompts sampled in each step."""

    samples_per_prompt: Annotated[int, Field(ge=1)] = 8
    """Responses for each prompt: the size of a group."""

    response_tokens_max: PositiveInt = 1024
    """Longest response, in tokens. A response that reaches it is truncated and counted."""

    temperature: PositiveFloat = 1.0
    """Divides the logits when sampling, and again when training, so that both see one distribution."""

    top_p: Fraction = 1.0
    """Nucleus sampling. Must be 1 in training rollouts: the trainer does not renormalise over the nucleus."""

    top_k: NonNegativeInt = 0
    """Sample from the k most likely tokens only; 0 is all. Must be 0 in training rollouts, for the same reason."""

    stop_token_ids: list[NonNegativeInt] = []
    """Token ids that end a response, besides the model's own end-of-sequence tokens."""

    requests_at_once: PositiveInt = 256
    """Responses that one engine decodes in one batch."""

    timeout_seconds: PositiveFloat = 600.0
    """Longest wait for all responses of a step, and for those of an evaluation. What an SGLang server still samples
    then is returned as it is. An engine that has not answered a minute after that is taken to have failed."""

    dynamic_sampling: DynamicSamplingConfig | None = None
    """Replace groups without signal by new prompts before training. Off unless given."""

    mismatch: MismatchConfig = MismatchConfig()
    """How far trainer and engines may differ."""
