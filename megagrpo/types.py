"""The data that travels between modules. Axes: [g] groups, [s] samples of a group, [t] tokens of a response."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from megagrpo.errors import EngineError, Problem
from megagrpo.routes import Routes

GATHERED_IDS = 512
"""Most ids of a set whose rows are gathered. Per id this moves a row of hidden numbers several times, for which a
product with more rows takes as long."""
FinishReason = Literal["stop", "length", "abort", "given"]
"""The reason why a response ended: a stop token was sampled, the token limit was reached, or the engine gave it up, at
a time limit or because it was asked to. given: it is its row's own (algorithm.distillation.given_responses)."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, rendered by the chat template, and its row. `id` is the same in every epoch and after a restart."""

    id: str
    tokens: tuple[int, ...]
    data_source: str
    ground_truth: str
    ability: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()
    text: str = ""
    """The messages rendered by the chat template, before they became tokens (and before the cut)."""
    taught: tuple[int, ...] = ()
    """The tokens that teachers read in place of `tokens` (algorithm.distillation.system). (): the same."""

    given: tuple[int, ...] = ()
    """The tokens of the row's own response (algorithm.distillation.given_responses). (): none."""

    def content(self) -> bytes:
        """Returns answer and tokens as bytes, which must be the same when a run resumes."""
        return f"{self.ground_truth}\0{len(self.tokens)}\0".encode() + array("q", self.tokens).tobytes()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of sampling. `temperature=0` is greedy; `top_p=1`, `top_k=0` and `min_p=0` use the whole (unpadded)
    vocabulary."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_tokens: tuple[int, ...] = ()
    routes: bool = False  # wanted with the sample, if the model has experts
    kept_sets: bool = False  # wanted with the sample, whose logprobs are then of the distribution over these sets


@dataclass(frozen=True, slots=True)
class KeptSets:
    """The ids of the vocabulary among which each token of a response was drawn: its kept set, in ascending order."""

    ids: np.ndarray  # int32 [ids of all sets, end to end]
    ends: np.ndarray  # int64 [t], where each token's set ends in `ids`; an empty set stands for the whole vocabulary

    @classmethod
    def of(cls, sets: Sequence[np.ndarray]) -> KeptSets:
        """Joins the sets of tokens, each int [ids] in any order."""
        ids = np.concatenate([np.empty(0, np.int32), *map(np.sort, sets)]).astype(np.int32)
        return cls(ids, np.cumsum([len(one) for one in sets], dtype=np.int64))

    @classmethod
    def joined(cls, parts: Iterable[tuple[KeptSets | None, int]]) -> KeptSets:
        """Joins kept sets with their numbers of tokens. None: drawn from the whole vocabulary."""
        known = [cls(np.empty(0, np.int32), np.zeros(count, np.int64)) if one is None else one for one, count in parts]
        sizes = np.concatenate([np.empty(0, np.int64), *(one.sizes for one in known)])
        return cls(np.concatenate([np.empty(0, np.int32), *(one.ids for one in known)]), sizes.cumsum())

    @property
    def sizes(self) -> np.ndarray:
        """Returns the number of ids of each token's set: int64 [t]."""
        return np.diff(self.ends, prepend=0)

    def part(self, first: int, end: int) -> KeptSets:
        """Returns the sets of tokens `first` to `end`, which is left out."""
        cuts = np.append(0, self.ends)
        return KeptSets(self.ids[cuts[first] : cuts[end]], self.ends[first:end] - cuts[first])

    def require(self, tokens: np.ndarray, where: str) -> None:
        """Raises EngineError unless each of `tokens`, int [t], is in its set, of ids in ascending order. `where` names
        the sample."""
        sizes = self.sizes
        if len(sizes) != len(tokens) or sizes.min(initial=0) < 0 or sizes.sum() != len(self.ids):
            raise EngineError(Problem(where, f"kept sets of {len(sizes)} tokens", f"those of its {len(tokens)} tokens"))
        of = np.repeat(np.arange(len(sizes)), sizes)
        twice = np.flatnonzero((np.diff(self.ids) <= 0) & (np.diff(of) == 0))
        if len(twice) or self.ids.min(initial=0) < 0:
            at = int(of[twice[0]] if len(twice) else of[self.ids.argmin()])
            given = f"kept ids of token {at + 1} of the response of which one is negative, or there twice"
            raise EngineError(Problem(where, given, "different ids of the vocabulary"))
        found = np.concatenate([[0], np.cumsum(self.ids == np.repeat(tokens, sizes))])
        wrong = np.flatnonzero((found[self.ends] - found[self.ends - sizes] != 1) & (sizes > 0))
        if len(wrong):
            at = int(wrong[0])
            given = f"{sizes[at]} kept ids of token {at + 1} of the response without the sampled one, {tokens[at]}"
            raise EngineError(Problem(where, given, "the ids among which it was drawn"))


@dataclass(frozen=True, slots=True)
class TeacherTokens:
    """A teacher's logprobs for the tokens of a response that the policy sampled: of each, and of the teacher's own most
    likely ids in its place."""

    logprobs: np.ndarray  # float32 [t]
    ids: np.ndarray  # int32 [t, k], most likely first; k is 0 if they were not asked for
    ids_logprobs: np.ndarray  # float32 [t, k]

    def part(self, first: int, end: int) -> TeacherTokens:
        """Returns those of tokens `first` to `end`, which is left out."""
        return TeacherTokens(self.logprobs[first:end], self.ids[first:end], self.ids_logprobs[first:end])


@dataclass(frozen=True, slots=True)
class Branch:
    """One sequence of an agent's rollout, as an engine saw it token for token: from the first message to an answer
    after which nothing was asked."""

    tokens: np.ndarray  # int32 [b]
    trained: np.ndarray  # bool [b], sampled by the policy and in no earlier branch; every other token is given
    routes: Routes | None = None  # of its tokens but the last, each as the first request that read it


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the policy in an agent's rollout that is trained on. Its tokens follow those of the turn before it
    in `Sample.tokens`."""

    number: int  # from 0, in the order in which the rollout's answers were sampled
    branch: int
    tokens: int
    reward: float | None = None  # given by the agent or its environment for this turn


@dataclass(frozen=True, slots=True)
class AgentRun:
    """The record of an agent's rollout, beside the tokens that its `Sample` has."""

    branches: tuple[Branch, ...]
    turns: tuple[Turn, ...]  # in the order of Sample.tokens: branch after branch
    messages: tuple[Mapping[str, Any], ...]  # the conversation that ends in the last answer of the first branch's root
    reward: Mapping[str, float] | None = None  # "score" and metrics; None: the agent gave none
    error: str = ""  # why the agent or its environment failed
    counts: Mapping[str, float] = field(default_factory=dict)  # by metric
    events: tuple[Mapping[str, Any], ...] = ()  # turns and tool calls in order of time, as JSON values


@dataclass(frozen=True, slots=True)
class Sample:
    """One response as the engine made it: the token ids that are trained on, never re-tokenised text.

    A sampled stop token is part of `tokens` (the policy must learn to stop). A rollout of an agent has the tokens of
    all its turns end to end, turn after turn as in `agent.turns`; `agent.branches` say what was read between them.
    `text` is then the last answer. Of a given response logprobs are NaN, versions 0, and `text` is empty.
    """

    prompt_id: str
    index: int
    tokens: np.ndarray  # int32 [t]
    logprobs: np.ndarray  # float32 [t], each in the engine's distribution at this temperature, over its kept set
    versions: np.ndarray  # int32 [t], the weight version that sampled each token
    finish: FinishReason
    text: str
    agent: AgentRun | None = None
    routes: Routes | None = None  # of prompt and response; those of an agent's rollout are in its branches
    kept: KeptSets | None = None  # None: drawn from the whole vocabulary
    teacher: TeacherTokens | None = None  # of a teacher that answers requests

    @property
    def given(self) -> bool:
        """Returns whether it is a response of the data, which the policy did not sample."""
        return self.finish == "given"


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to generate. `seed` is a hash of recipe seed, step, prompt id and index (rollout/requests.py).

    `begun` is the part that an engine has sampled already: the response resumes after its tokens, up to
    `sampling.max_tokens` in all.
    """

    prompt_id: str
    index: int
    tokens: tuple[int, ...]
    seed: int
    sampling: SamplingParams
    begun: Sample | None = None

    @property
    def read(self) -> tuple[int, ...]:
        """Returns all tokens after which the engine samples: of the prompt, and of what has begun."""
        return self.tokens if self.begun is None else (*self.tokens, *map(int, self.begun.tokens))

    @property
    def tokens_left(self) -> int:
        """Returns the most tokens that are still to be sampled."""
        return self.sampling.max_tokens - (0 if self.begun is None else len(self.begun.tokens))


@dataclass(frozen=True, slots=True)
class Score:
    """The rewards of one sample.

    `value` is None if the sample is masked: because a reward raised or timed out (`error` says how; never a score of
    0), or because the recipe leaves the sample out (`masked` says why). Evaluations alone give 0, with the `error`, to
    a rollout whose agent was late or failed.
    """

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    masked: str = ""
    counted: tuple[float, ...] = ()  # raw score of each function in order, 0 if its gate was shut; empty if masked
    solved: bool = False  # the functions' weighted sum, before penalties and masks, reached reward.solved_at
    notes: Mapping[str, str] = field(default_factory=dict)  # texts that functions returned, as name.key
    answer: str | None = None  # the answer, as read by the first function that returns one


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one prompt in one step, with their scores once they are known."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    scores: tuple[Score, ...] = ()
    baseline: Sample | None = None  # the greedy response, with which remax compares the samples
    baseline_score: Score | None = None

    @property
    def given(self) -> bool:
        """Returns whether its only sample is a given response."""
        return any(sample.given for sample in self.samples)

    @property
    def responses(self) -> tuple[Sample, ...]:
        """Returns the samples, and after them the baseline, if there is one."""
        return self.samples if self.baseline is None else (*self.samples, self.baseline)

    @property
    def sequence_tokens(self) -> int:
        """Counts the tokens of all sequences: of the prompt with each response, or of branches of agents' rollouts."""
        alone = [len(self.prompt.tokens) + len(sample.tokens) for sample in self.samples if sample.agent is None]
        branches = [branch for sample in self.samples if sample.agent for branch in sample.agent.branches]
        return sum(alone) + sum(len(branch.tokens) for branch in branches)
