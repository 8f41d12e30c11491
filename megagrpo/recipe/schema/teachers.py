"""teachers: models from which the policy learns (algorithm.distillation)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megagrpo.recipe.schema.reward import ServedModelConfig
from megagrpo.recipe.schema.rollout import has_host
from megagrpo.recipe.schema.train import LayoutConfig
from megagrpo.section import ByName, Count, PositiveInt, Rules, Seconds, Section


class BudgetConfig(Section):
    """The budget of a teacher in a step of training."""

    tokens: PositiveInt | None = None
    """Most tokens that are sent and answered. Requests in flight are finished."""

    seconds: Seconds | None = None
    """Most seconds in which answers are awaited. Requests in flight are cut off."""


class AskedTeacher(Section):
    """A teacher that answers requests: for the logprobs of given tokens."""

    on_ranks: ClassVar[bool] = False

    timeout_seconds: Seconds = 120.0
    """Timeout of one request."""

    retries: Annotated[int, Field(ge=0, le=100)] = 3
    """Most retries of a request that failed."""

    budget: BudgetConfig = BudgetConfig()
    """The budget of a step. Responses beyond it are left out and counted, not as failures."""

    cache: bool = False
    """Answers are kept in the run's directory: an equal request is not sent again. A token takes 4 bytes, and 8 for
    each id of teacher_top_k."""


class ServedTeacherConfig(AskedTeacher, ServedModelConfig):
    """A server that the run starts, with weights of its own."""

    kind: Literal["server"] = "server"
    """server: SGLang's or vLLM's, on devices of its own."""


class ExternalTeacherConfig(AskedTeacher):
    """A server that runs already, of SGLang's or vLLM's, with logprobs of prompts by token ids."""

    kind: Literal["external"] = "external"
    """external: a server that runs already."""

    engine: Literal["sglang", "vllm"] = "sglang"
    """Engine of the server. An API that takes text alone would read other tokens."""

    url: str
    """Such as http://host:30000."""

    tokenizer: str
    """Hugging Face directory or hub id with the tokenizer of the server's model, to compare it with the policy's."""

    api_key_variable: str | None = None
    """Environment variable with the server's API key."""

    requests_at_once: Count = 64
    """Requests on the way."""

    RULES: ClassVar[Rules[ExternalTeacherConfig]] = {"url_of_a_teacher": lambda teacher: not has_host(teacher.url)}


class RanksTeacherConfig(Section):
    """Weights on the training ranks, beside the policy's. Of any size and family."""

    on_ranks: ClassVar[bool] = True

    kind: Literal["ranks"] = "ranks"
    """ranks: another model on the training ranks."""

    path: str
    """Hugging Face directory or hub id."""

    layout: LayoutConfig | None = None
    """Parallel sizes of its own, of as many ranks as train.layout has. null: those of train.layout."""

    offload: bool = False
    """Keep its weights in host memory, but for its pass in a step."""


class ReferenceTeacherConfig(Section):
    """The reference policy of algorithm.reference: the policy's starting weights, or a moving average of the policy
    (self-distillation). It and the KL penalty share one set of weights."""

    on_ranks: ClassVar[bool] = True

    kind: Literal["reference"] = "reference"
    """reference: the reference policy. With train.lora it costs no more than a second adapter."""


TeacherConfig = Annotated[
    ServedTeacherConfig | ExternalTeacherConfig | RanksTeacherConfig | ReferenceTeacherConfig, ByName("kind")
]
