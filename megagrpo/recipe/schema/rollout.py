"""rollout: the sampling of responses to prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from megagrpo.recipe.schema.run import Pause
from megagrpo.rollout.kinds import ENGINES, EngineKind
from megagrpo.section import (
    Count,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Rules,
    Seconds,
    Section,
    Temperature,
    Tokens,
    repeated,
)

if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = Literal[tuple(ENGINES)]


class EngineLayoutConfig(Section):
    """Parallel sizes of one engine of servers: tensor x pipeline devices, within a node or on several whole ones."""

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


class _Servers(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True, use_attribute_docstrings=True)
    ENGINE: ClassVar[str]

    @property
    def engine_kind(self) -> EngineKind:
        """Returns the kind of engines that has these servers."""
        return ENGINES[self.ENGINE]

    def wrong_numbers(self, *names: str) -> Iterator[dict[str, object]]:
        """Yields the arguments of these names that are no positive integers."""
        for name, value in ((name, (self.model_extra or {}).get(name)) for name in names):
            if value is not None and (type(value) is not int or value <= 0):
                yield {"name": name, "value": value}


class SglangConfig(_Servers):
    """SGLang servers. Every key but `python` is an argument of `sglang.launch_server`, with underscores."""

    ENGINE = "sglang"

    python: str | None = None
    """Interpreter of another environment that has SGLang; the default is the one that runs megagrpo."""


class VllmConfig(_Servers):
    """vLLM servers. Every key but `python` is an argument of `vllm serve`, with underscores."""

    ENGINE = "vllm"

    python: str | None = None
    """Interpreter of an environment that has vLLM. The default is .venv-vllm/bin/python, in the working directory or
    beside the environment that runs megagrpo, if it exists, else the one that runs megagrpo."""


def settings_of_others(section: Section, kind: EngineKind) -> Iterator[dict[str, object]]:
    """Yields the settings of servers in a section of the recipe that are not for its kind of engines."""
    for other in ENGINES.values():
        name = other.settings
        if name not in (None, kind.settings) and getattr(section, name) != type(section).model_fields[name].default:
            yield {"section": name}


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

    own_routes_every_steps: PositiveInt | None = None
    """Every so many steps, a further pass without gradients measures the mismatch that the trainer's own routes would
    give: the metrics own_routes. null: never. Only for algorithm.routing that replays."""


class DynamicSamplingConfig(Section):
    """Replacement of groups that teach nothing, such as those whose responses all have the same score, by those of new
    prompts (DAPO, arXiv:2503.14476, section 3.2). Groups with a teacher teach something.
    """

    rounds_max: Annotated[int, Field(ge=1, le=10**6)] = 4
    """Most sampling rounds of a step, the first included. After them the step trains on the groups that it has."""


AlertName = Literal[
    "gradient_not_finite",
    "kl_without_reward",
    "divergence_grows",
    "no_teacher",
    "entropy_collapse",
    "length_explosion",
    "truncated",
    "no_signal",
    "mismatch",
    "routes_differ",
    "routes_missing",
    "staleness",
    "overfitting",
    "reward_errors",
]
"""The rules of docs/health.md."""

RESPONSES_MAX = 2**20
VLLM_NUMBERS = ("max_num_batched_tokens", "kv_cache_memory_bytes")
SGLANG_NUMBERS = ("max_running_requests", "max_total_tokens", "chunked_prefill_size", "sampling_mask_max_tokens")


def has_host(url: str) -> bool:
    """Returns whether a URL is http:// or https:// with a host."""
    try:
        parts = urlsplit(url)
    except ValueError:  # such as half of an IPv6 address
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


class RolloutConfig(Section):
    """The generation of responses for training."""

    engine: EngineName = "transformers"
    """Engine that generates. transformers: embedded, for CPUs and tests. sglang, vllm: servers that the run starts and
    ends. external, external_vllm: SGLang and vLLM servers that run already, at `urls`."""

    engines: Count = 1
    """Number of engines; requests are spread over them. With servers that run already, the number of `urls`."""

    layout: EngineLayoutConfig = EngineLayoutConfig()
    """Parallel layout of each engine of servers; vLLM has tensor alone."""

    sglang: SglangConfig = SglangConfig()
    """The SGLang servers that the run starts: an interpreter, and any server argument."""

    vllm: VllmConfig = VllmConfig()
    """The vLLM servers that the run starts: an interpreter, and any server argument."""

    urls: list[str] = []
    """Servers that run already, such as http://host:30000, one for each engine."""

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
    """Nucleus sampling: from the likeliest tokens that hold this share of the probability. Training then renormalises
    over the tokens among which the engine drew each one. SGLang returns these only with a top_k."""

    top_k: NonNegativeInt = 0
    """Sample from the k most likely tokens only; 0 is all. Training renormalises as for top_p."""

    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Sample only from tokens that are at least so likely, as a share of the likeliest one's probability; 0 is all.
    Training renormalises as for top_p. For the transformers engine."""

    stop_token_ids: list[NonNegativeInt] = []
    """Token ids that end a response, besides the end-of-sequence tokens of the model's files and of its tokenizer."""

    requests_at_once: Count = 256
    """Responses that one engine decodes in one batch."""

    timeout_seconds: Seconds = 600.0
    """Longest time of a response on a server. What it has then is returned as it is, and is not trained on;
    where the schedule lets weights change in a response, it resumes after these tokens. An engine that has not
    answered a minute after that is taken to have failed."""

    no_engine_timeout_seconds: Seconds = 1800.0
    """Longest time that a run waits for an engine while all have failed and none has started again."""

    quantization: Literal["fp8"] | None = None
    """fp8: linear layers and experts are in float8, in blocks of 128 x 128 with a scale each, quantised in each sync.
    SGLang servers multiply bfloat16 models in float8, on Hopper and Ada GPUs: half the memory and the bytes of a sync.
    The embedded engine computes with the values of the blocks in the model's dtype, on any device, to try it out. The
    mismatch with the trainer is larger; see train.quantization."""

    dynamic_sampling: DynamicSamplingConfig | None = None
    """Replace groups without signal by new prompts before training. Off unless given."""

    mismatch: MismatchConfig = MismatchConfig()
    """Limits on the difference between logprobs of trainer and engines."""

    alerts: dict[AlertName, Literal["warn", "stop", "off"]] = {}
    """Reaction to a rule of docs/health.md that holds; the default is warn. warn: print it once, and again when it has
    ceased and holds again. stop: save a checkpoint of the step, then end the run with an error. off: nothing."""

    @property
    def kind(self) -> EngineKind:
        return ENGINES[self.engine]

    @property
    def multiplies_in_float8(self) -> bool:
        """Returns whether engines compute in float8, not only with weights that were rounded to it."""
        return self.quantization is not None and self.kind.multiplies_in_float8

    @property
    def devices_of_engine(self) -> int:
        """Returns the number of devices of one engine; 0 if the run does not start it."""
        return (self.layout.ranks if self.kind.splits else 1) if self.kind.started_by_us else 0

    @property
    def server_context(self) -> object:
        """Returns the longest prompt with its response that the recipe gives to servers; None if it gives none."""
        return self.kind.options(self).get(self.kind.context or "")

    @property
    def narrowing(self) -> list[str]:
        """Returns the fields that keep tokens from being sampled: the trainer then needs each token's kept set."""
        return [field for field, whole in (("top_p", 1), ("top_k", 0), ("min_p", 0)) if getattr(self, field) != whole]

    @property
    def samples_per_step(self) -> int:
        """Returns the responses that a step asks for."""
        return self.prompts_per_step * self.samples_per_prompt

    RULES: ClassVar[Rules[RolloutConfig]] = {
        "too_many_responses": lambda r: r.samples_per_step > RESPONSES_MAX,
        "kept_sets_of_another_engine": lambda r: (
            {"field": field, "value": getattr(r, field)} for field in r.narrowing if not r.kind.returns_kept_sets
        ),
        "top_k_of_kept_sets": lambda r: (
            (most := r.kind.kept_ids_max(r)) is not None
            and (r.top_p != 1 or r.top_k)
            and not 0 < r.top_k < most
            and {"most": most, "advised": most // 2}
        ),
        "min_p_of_another_engine": lambda r: r.min_p and not r.kind.returns_sets_of_min_p,
        "nothing_to_choose": lambda r: r.top_k == 1,
        "no_urls": lambda r: not r.kind.started_by_us and not r.urls,
        "urls_of_engines": lambda r: (
            r.urls and not r.kind.started_by_us and len(r.urls) != r.engines and {"count": len(r.urls)}
        ),
        "url_twice": lambda r: ({"urls": url} for url in repeated(r.urls) if not r.kind.started_by_us),
        "url_of_a_server": lambda r: ({"url": url} for url in r.urls if not r.kind.started_by_us and not has_host(url)),
        "server_fields_without_external_servers": lambda r: (
            {"field": field, "value": value}
            for field in ("urls", "api_key_variable")
            if r.kind.started_by_us and (value := getattr(r, field))
        ),
        "settings_of_another_engine": lambda r: settings_of_others(r, r.kind),
        "quantization_of_another_engine": lambda r: not r.kind.quantizes and r.quantization,
        # Arguments that plans calculate with. Engines themselves check all arguments before a run.
        "mem_fraction_static": lambda r: (
            (share := (r.sglang.model_extra or {}).get("mem_fraction_static")) is not None
            and not (isinstance(share, float) and 0 < share < 1)
        ),
        "sglang_number": lambda r: (
            of for of in r.sglang.wrong_numbers(*SGLANG_NUMBERS) if of != {"name": "chunked_prefill_size", "value": -1}
        ),
        "gpu_memory_utilization": lambda r: (
            (share := (r.vllm.model_extra or {}).get("gpu_memory_utilization")) is not None
            and not (type(share) in (float, int) and 0 < share <= 1)
        ),
        "vllm_number": lambda r: r.vllm.wrong_numbers(*VLLM_NUMBERS),
        "layout_of_the_embedded_engine": lambda r: (
            {"field": field, "size": size}
            for field, size in r.layout.model_dump().items()
            if size > 1 and not r.kind.splits
        ),
        "expert_divides_tensor": lambda r: r.kind.splits and r.layout.tensor % r.layout.expert,
        "attention_data_divides_tensor": lambda r: r.kind.splits and r.layout.tensor % r.layout.attention_data,
    }
