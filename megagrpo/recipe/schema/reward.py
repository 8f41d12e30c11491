"""reward: the scoring of responses, and the models that score or judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from megagrpo.errors import Problem
from megagrpo.recipe.schema.rollout import SglangConfig, VllmConfig, settings_of_others
from megagrpo.rollout.kinds import ENGINES
from megagrpo.section import ByName, Count, Number, PositiveFloat, Rules, Seconds, Section, Tokens, entry_of

if TYPE_CHECKING:
    JudgesEngine = str
else:
    JudgesEngine = Literal[tuple(name for name, kind in ENGINES.items() if kind.answers_chats)]
Device = Literal["auto", "cpu"]
DType = Literal["auto", "float32", "bfloat16"]


class RewardFunctionConfig(Section):
    """One reward, its weight, and its own arguments."""

    function: str
    """A built-in function such as gsm8k, math or format (docs/rewards.md lists them), or FILE.py:FUNCTION of your own,
    called with what its parameters name."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=60)] | None = None
    """Its name in metrics. null: the function's."""

    weight: Number = 1.0
    """The sample's reward is the weighted sum over all functions."""

    counts: Literal["auto", "always", "when_others_score"] = "auto"
    """always: added whatever the others give. when_others_score: only if the functions that always count give a sum
    other than 0, so that a well-formed wrong answer earns nothing. (If a wrong answer costs something, such as -1, the
    function then counts too.) auto: when_others_score for `format` beside others that always count, else always."""

    arguments: dict[str, Any] = {}
    """Keyword arguments of the function, such as method: flexible for gsm8k or pattern for format."""


class OverlongConfig(Section):
    """Penalty that grows over the last tokens before the limit (DAPO, arXiv:2503.14476, eq. 13)."""

    buffer_tokens: Tokens
    """The penalty begins this many tokens before rollout.response_tokens_max."""

    penalty: PositiveFloat = 1.0
    """Subtracted at the limit; between, in proportion to the tokens used of the buffer."""


class ClassifierConfig(Section):
    """A reward model with a head for sequence classification, for the function reward_model."""

    kind: Literal["classifier"] = "classifier"
    """classifier: transformers' AutoModelForSequenceClassification, in a process of its own."""

    path: str
    """Hugging Face directory or hub id, with the model's own tokenizer."""

    device: Device = "auto"
    """auto: one device of its own, of the kind that training has. cpu: the processors of a node, beside GPUs too."""

    dtype: DType = "auto"
    """Type of weights and activations. auto: bfloat16 on GPUs, float32 on CPUs."""

    chat_template: str | None = None
    """Jinja file that turns the conversation into text. null: the tokenizer's own."""

    tokens_per_batch: Tokens = 16384
    """Most tokens of a batch, padding included. A longer conversation is a batch by itself."""

    tokens_max: Tokens | None = None
    """Longest conversation; a longer one is an error of its response, which is masked. null: the model's
    max_position_embeddings."""

    @property
    def devices(self) -> int:
        """Returns the number of its own devices."""
        return 0 if self.device == "cpu" else 1


class ServedModelConfig(Section):
    """A model on a server that the run starts, on devices of its own."""

    engine: JudgesEngine = "sglang"
    """Engine of the server."""

    path: str
    """Hugging Face directory or hub id."""

    devices: Count = 1
    """Devices of its own, which share each matrix (tensor parallel)."""

    dtype: DType = "auto"
    """Type of weights and activations. auto: bfloat16 on GPUs, float32 on CPUs."""

    requests_at_once: Count = 64
    """Requests that it computes in one batch."""

    sglang: SglangConfig = SglangConfig()
    """An interpreter with SGLang, and any server argument."""

    vllm: VllmConfig = VllmConfig()
    """An interpreter with vLLM, and any server argument."""

    @property
    def settings(self) -> SglangConfig | VllmConfig:
        """Returns the settings of its server."""
        return getattr(self, str(ENGINES[self.engine].settings))  # type: ignore[no-any-return]

    RULES: ClassVar[Rules[ServedModelConfig]] = {
        "settings_of_another_engine": lambda model: settings_of_others(model, ENGINES[model.engine]),
    }


class GenerativeConfig(ServedModelConfig):
    """A model that writes verdicts, for judge, judge_pairs and judge_ranking."""

    kind: Literal["generative"] = "generative"
    """generative: a server, asked by judge and its like."""

    tokens_max: Tokens = 8192
    """Longest question with its answer."""


RewardModelConfig = Annotated[ClassifierConfig | GenerativeConfig, ByName("kind")]


class RewardConfig(Section):
    """The scoring of responses."""

    functions: list[RewardFunctionConfig] = []
    """One or several functions, for the rows that no entry of by_source is for."""

    by_source: dict[str, Annotated[list[RewardFunctionConfig], Field(min_length=1)]] = {}
    """Functions by a row's data_source: a name, or a pattern such as math*. A name comes before patterns, which are
    tried in the order written. Without `functions`, a row that no entry is for is an error before the run starts. A run
    that learns from teachers alone has neither."""

    models: dict[str, RewardModelConfig] = {}
    """Models that the run starts, by the names under which functions ask them: `model: NAME`."""

    workers: Annotated[int, Field(ge=0, le=4096)] = 2
    """Processes that run rewards needing isolation (math, your own functions): spread over the nodes of the run, the
    driver's first."""

    timeout_seconds: Seconds = 10.0
    """Longest time for one response. Past it the sample is masked and counted, never scored 0."""

    memory_gib: Annotated[PositiveFloat, Field(le=2**20)] = 8.0
    """Memory of each of these processes, in GiB. A function that wants more gets a MemoryError."""

    environment: list[str] = []
    """Names of environment variables that the functions see beside harmless ones such as PATH, for example a token."""

    failed_share_max: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The run ends if a larger share of a step's responses has no score because a function failed."""

    solved_at: Number | None = None
    """A response is solved if its functions' weighted sum, before penalties, is at least this. null: full marks of
    every function, the sum of all weights above 0. Give it where a function's full mark is not 1."""

    overlong: OverlongConfig | None = None
    """Penalty for responses near the token limit. Off unless given."""

    non_stop_score: Number | None = None
    """Score of a response that reached the token limit instead of a stop token, whatever its functions say. null: as
    they say."""

    truncated: Literal["score", "mask"] = "score"
    """Responses that reached the token limit. mask: they are neither trained on nor in their group's statistics."""

    @property
    def scores(self) -> bool:
        """Returns whether there are functions at all. If not, teachers alone teach, and every score is 0."""
        return bool(self.functions or self.by_source)

    def lists(self) -> dict[str, list[RewardFunctionConfig]]:
        """Returns every list of functions, by the field that holds it."""
        named = {f"reward.by_source.{source}": functions for source, functions in self.by_source.items()}
        return ({"reward.functions": self.functions} if self.functions else {}) | named

    def list_of(self, data_source: str) -> str | None:
        """Returns the field whose functions score rows of this data source; None if there is none."""
        if (entry := entry_of(data_source, self.by_source)) is not None:
            return f"reward.by_source.{entry}"
        return "reward.functions" if self.functions else None

    def source_problem(self, data_source: str, where: str) -> Problem | None:
        """Returns a problem if no function scores the row at `where`."""
        if not self.scores or self.list_of(data_source) is not None:
            return None
        needed = f"one that reward.by_source has functions for: {', '.join(self.by_source)}"
        fix = f"add `{data_source}` or a pattern to reward.by_source, or reward.functions for all other rows"
        return Problem(f"{where}, data_source", data_source, needed, fix)

    def _lists(self, wrong: Callable[[RewardFunctionConfig], bool]) -> Iterator[dict[str, object]]:
        """Yields the place of each list all of whose functions are wrong."""
        for field, functions in self.lists().items():
            if all(map(wrong, functions)):
                yield {"list": field.removeprefix("reward.")}

    RULES: ClassVar[Rules[RewardConfig]] = {
        "weights_of_zero": lambda reward: reward._lists(lambda entry: entry.weight == 0),
        "no_function_always_counts": lambda reward: reward._lists(lambda entry: entry.counts == "when_others_score"),
        "score_of_masked_responses": lambda reward: reward.non_stop_score is not None and reward.truncated == "mask",
    }
