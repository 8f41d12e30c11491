"""rollout: the sampling of responses to prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from megagrpo.errors import Problem
from megagrpo.recipe.schema.run import Pause
from megagrpo.section import (
    Count,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    Seconds,
    Section,
    Temperature,
    Tokens,
)


class EngineLayoutConfig(Section):
    """Parallel sizes of one SGLang engine. It has tensor x pipeline devices, within a node or on several whole ones."""

    tensor: Count = 1
    """Ranks that share each matrix."""

    expert: Count = 1
    """Ranks that share the experts of a layer; a divisor of tensor, as in SGLang."""

    attention_data: Count = 1
    """Groups of tensor ranks, each with requests and a cache of its own (SGLang's attn_dp_size); a divisor of tensor.
    Attention is split over the tensor / attention_data ranks of a group. For latent attention, whose cache is whole on
    each rank of a group."""

    pipeline: Count = 1
    """Stages, each with a run of the layers, on tensor ranks of its own."""

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline

    def pause_of(self, wanted: Pause) -> Pause:
        """Returns `wanted`, or finish for pipelines: SGLang's continue to sample while they are paused."""
        return "finish" if self.pipeline > 1 else wanted


class SglangConfig(BaseModel):
    """SGLang servers. Every key but `python` is an argument of `sglang.launch_server`, with underscores."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, use_attribute_docstrings=True)

    python: str | None = None
    """Interpreter of another environment that has SGLang; the default is the one that runs megagrpo."""


class MismatchConfig(Section):
    """Comparison of the trainer's logprobs of the sampled tokens with the engines': figures to report, action to take.

    Both are compared in every step that trains the policy; `megagrpo report RUN --mismatch` shows it. With
    algorithm.rollout_logprobs_as_old and several minibatches the trainer's are those of the update itself, so the
    figures also measure how far the policy has moved by then.
    """

    metric: Literal["mean", "p99", "max", "k3"] = "p99"
    """Metric that `above` limits: logprob_difference/METRIC of the metrics table, in nats."""

    above: NonNegativeFloat | None = None
    """Threshold of the metric. null: nothing is done, whatever the difference."""

    then: Literal["warn", "stop"] = "warn"
    """Past the threshold. warn: say so. stop: save a checkpoint of the step, then end the run with an error."""

    worst_tokens: Annotated[int, Field(ge=1, le=256)] = 8
    """Tokens with the largest differences that each step writes to mismatch.jsonl, with their text."""


class DynamicSamplingConfig(Section):
    """Replacement of groups that teach nothing, such as those whose responses all have the same score, by those of new
    prompts (DAPO, arXiv:2503.14476, section 3.2).
    """

    rounds_max: Annotated[int, Field(ge=1, le=10**6)] = 4
    """Most sampling rounds of a step, the first included. After them the step trains on the groups that it has."""


AlertName = Literal[
    "gradient_not_finite",
    "kl_without_reward",
    "entropy_collapse",
    "length_explosion",
    "truncated",
    "no_signal",
    "mismatch",
    "staleness",
    "overfitting",
    "reward_errors",
]
"""The rules of docs/health.md."""

RESPONSES_MAX = 2**20


class RolloutConfig(Section):
    """The generation of responses for training."""

    engine: Literal["transformers", "sglang", "external"] = "transformers"
    """Engine that generates. transformers: embedded, for CPUs and tests. sglang: servers that the run starts and ends.
    external: SGLang servers that run already, at `urls`."""

    engines: Count = 1
    """Number of engines; requests are spread over them. With external, the number of `urls`."""

    layout: EngineLayoutConfig = EngineLayoutConfig()
    """Parallel layout of each SGLang engine."""

    sglang: SglangConfig = SglangConfig()
    """The SGLang servers that the run starts: an interpreter, and any server argument."""

    urls: list[str] = []
    """Servers of an external engine, such as http://host:30000, one for each engine."""

    api_key_variable: str | None = None
    """Environment variable with the API key of external servers."""

    prompts_per_step: Annotated[int, Field(ge=1, le=10**6)]
    """Prompts sampled in each step."""

    samples_per_prompt: Annotated[int, Field(ge=1, le=10**5)] = 8
    """Responses for each prompt: the size of a group."""

    response_tokens_max: Tokens = 1024
    """Longest response, in tokens. A response that reaches it is truncated and counted."""

    temperature: Temperature = 1.0
    """Divides the logits when sampling, and again when training, so that both see one distribution."""

    top_p: Fraction = 1.0
    """Nucleus sampling. Must be 1 in training rollouts: the trainer does not renormalise over the nucleus."""

    top_k: NonNegativeInt = 0
    """Sample from the k most likely tokens only; 0 is all. Must be 0 in training rollouts, for the same reason."""

    stop_token_ids: list[NonNegativeInt] = []
    """Token ids that end a response, besides the model's own end-of-sequence tokens."""

    requests_at_once: Count = 256
    """Responses that one engine decodes in one batch."""

    timeout_seconds: Seconds = 600.0
    """Longest time of a response on an SGLang server. What it has then is returned as it is, and is not trained on;
    where the schedule lets weights change in a response, it goes on after these tokens. An engine that has not
    answered a minute after that is taken to have failed."""

    no_engine_timeout_seconds: Seconds = 1800.0
    """Longest time that a run waits for an engine while all have failed and none has started again."""

    quantization: Literal["fp8"] | None = None
    """fp8: SGLang servers hold linear layers and experts in float8, in blocks of 128 x 128 with a scale each, and
    multiply in float8. Each sync quantises the trainer's bfloat16 weights. For Hopper and Ada GPUs. Half the memory and
    the bytes of a sync, and a larger mismatch with the trainer."""

    dynamic_sampling: DynamicSamplingConfig | None = None
    """Replace groups without signal by new prompts before training. Off unless given."""

    mismatch: MismatchConfig = MismatchConfig()
    """Limits on the difference between logprobs of trainer and engines."""

    alerts: dict[AlertName, Literal["warn", "stop", "off"]] = {}
    """Reaction to a rule of docs/health.md that holds; the default is warn. warn: print it once, and again when it has
    ceased and holds again. stop: save a checkpoint of the step, then end the run with an error. off: nothing."""

    @property
    def devices_of_engine(self) -> int:
        """Returns the number of devices of one engine; 0 if the run does not start it."""
        return {"transformers": 1, "sglang": self.layout.ranks, "external": 0}[self.engine]

    def rules(self) -> Iterator[Problem]:
        reason = "training divides by the probabilities of the whole vocabulary, so sampling must draw from all of it"
        responses = self.prompts_per_step * self.samples_per_prompt
        if responses > RESPONSES_MAX:
            needed = f"at most {RESPONSES_MAX:,} in a step"
            yield Problem("prompts_per_step", f"{responses:,} responses", needed, "lower it, or samples_per_prompt")
        if self.top_p != 1:
            yield Problem("top_p", given=f"{self.top_p}", needed=f"1: {reason}", fix="top_p: 1.0, or remove it")
        if self.top_k:
            yield Problem("top_k", given=f"{self.top_k}", needed=f"0: {reason}", fix="top_k: 0, or remove it")
        yield from self._url_rules() if self.engine == "external" else self._no_url_rules()
        if self.engine != "sglang" and (self.sglang.python is not None or self.sglang.model_extra):
            given = f"settings, with engine: {self.engine}"
            needed = "nothing: they are for servers that the run starts"
            fix = "remove them (rollout.sglang={} as an override), or write engine: sglang"
            yield Problem("sglang", given, needed, fix)
        if self.engine != "sglang" and self.quantization:
            given = f"{self.quantization}, with engine: {self.engine}"
            needed = "null: the run sends quantised weights to servers that it starts"
            yield Problem("quantization", given, needed, "remove it, or write engine: sglang")
        yield from self._number_rules()
        sizes = self.layout.model_dump()
        if self.engine == "transformers":
            for field, size in sizes.items():
                if size > 1:
                    given = f"{size}, with engine: transformers"
                    needed = "1: the embedded engine is one process"
                    yield Problem(f"layout.{field}", given, needed, f"{field}: 1, or engine: sglang")
            return
        for field, shared in (("expert", "experts are shared by"), ("attention_data", "its groups are among")):
            if self.layout.tensor % sizes[field]:
                given = f"{sizes[field]}, with tensor {self.layout.tensor}"
                needed = f"a divisor of tensor: {shared} the same {self.layout.tensor} ranks"
                yield Problem(f"layout.{field}", given, needed, f"{field}: 1, or {field}: as tensor")

    def _no_url_rules(self) -> Iterator[Problem]:
        for field, given in (("urls", self.urls), ("api_key_variable", self.api_key_variable)):
            if given:
                needed = "nothing: they are for servers that run already"
                fix = "remove it, or write engine: external"
                yield Problem(field, f"{given}, with engine: {self.engine}", needed, fix)

    def _url_rules(self) -> Iterator[Problem]:
        if len(self.urls) != self.engines:
            given = f"{len(self.urls)} urls for {self.engines} engine{'s' if self.engines > 1 else ''}"
            fix = f"engines: {len(self.urls)}" if self.urls else "urls: [http://host:30000]"
            yield Problem("urls", given, "the url of each engine", fix)
        if twice := sorted({url for url in self.urls if self.urls.count(url) > 1}):
            yield Problem("urls", f"{', '.join(twice)} more than once", "each server once", "remove one")
        for url in self.urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                yield Problem("urls", url, "http:// or https://, and a host", "write http://host:30000")

    def _number_rules(self) -> Iterator[Problem]:
        """Yields problems of arguments that plans calculate with. SGLang itself checks all arguments before a run."""
        options = self.sglang.model_extra or {}
        share = options.get("mem_fraction_static")
        if share is not None and not (isinstance(share, float) and 0 < share < 1):
            needed = "a share of a GPU's memory, above 0 and below 1"
            yield Problem("sglang.mem_fraction_static", f"{share}", needed, "mem_fraction_static: 0.5")
        for name in ("max_running_requests", "max_total_tokens", "chunked_prefill_size"):
            value = options.get(name)
            whole = value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0)
            if not whole and not (name == "chunked_prefill_size" and value == -1):
                yield Problem(f"sglang.{name}", given=f"{value}", needed="a whole number above 0", fix="remove it")
