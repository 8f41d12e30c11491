"""The requests of a rollout's agent and the policy's answers, in tokens; the branches that they form; their sample and
its events.

A rollout is a forest of turns. A turn holds only what it adds: the tokens that the gateway put in front (of a prompt,
or of what came after an answer: never trained), and those that the policy sampled. A path from a root to a leaf, put
end to end, is what the engine saw, token for token.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np

from megagrpo.agents.dialects.chat_request import Message
from megagrpo.errors import EngineError, Problem, brief
from megagrpo.routes import FIX, Routes
from megagrpo.track.rollout_files import LEFT_OUT
from megagrpo.types import AgentRun, Branch, FinishReason, KeptSets, Request, Sample, SamplingParams, Turn

DIGEST_BYTES = 16
TurnRewards = Sequence[float] | Mapping[str, float] | None


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a rollout. `sampling.max_tokens` is for one answer."""

    turns_max: int
    tokens_max: int  # of a branch, the prompt and all of its turns
    sampling: SamplingParams
    seed: int


@dataclass(eq=False, slots=True, repr=False)
class AskedTurn:
    """One answer of the policy. It continues the conversation of `match.turn`, and the tokens of `parent`: the same
    turn, or none if the whole conversation had to be rendered."""

    number: int  # in the order in which the engine answered
    answer: str  # ChatAnswer.id
    match: Match
    parent: AskedTurn | None
    given: Sequence[Message]  # messages of the request behind `match.turn`
    message: Message
    added: np.ndarray  # int32: the prompt, or the tokens after the parent's answer
    sampled: np.ndarray  # int32
    logprobs: np.ndarray  # float32, of sampled
    versions: np.ndarray  # int32, of sampled
    finish: FinishReason
    text: str
    thought: bool  # it or an earlier turn of its branch has reasoning in its tokens
    experts: np.ndarray | None = None  # rows of Routes for the tokens that its request reads first: from the parent's
    # last token, or the prompt's first, to the one before the last sampled; None: the engine sent none
    kept: KeptSets | None = None  # of sampled
    children: list[AskedTurn] = field(default_factory=list)
    followed: bool = False

    def path(self) -> list[AskedTurn]:
        """Returns the turns whose tokens this one's engine saw, and itself."""
        return _chain(self, lambda turn: turn.parent)

    def conversation(self) -> list[AskedTurn]:
        """Returns the turns that this one follows, however they were rendered, and itself."""
        return _chain(self, lambda turn: turn.match.turn)

    def tokens(self) -> np.ndarray:
        """Returns all tokens that the engine saw and sampled, int32."""
        return np.concatenate([part for turn in self.path() for part in (turn.added, turn.sampled)])


def _chain(turn: AskedTurn | None, before: Callable[[AskedTurn], AskedTurn | None]) -> list[AskedTurn]:
    turns = []
    while turn is not None:
        turns.append(turn)
        turn = before(turn)
    return turns[::-1]


@dataclass(frozen=True, slots=True)
class Match:
    """The part of a request that is known already, and digests of the request."""

    turn: AskedTurn | None  # the latest answer that ends a beginning of its messages
    covered: int  # messages up to and with that answer
    other_tools: bool  # the answer was asked with other tools: its tokens cannot be continued
    digest: bytes  # of all of it: turns of the same request are alternatives to each other
    tools: bytes
    messages: bytes
    beginning: bytes  # messages up to the first user's: requests that share it are one conversation, edited or not


PathOfTurns = Sequence[tuple[AskedTurn, bool]]
"""The turns of a branch, each with whether it is trained in it."""


@dataclass(eq=False, repr=False)
class Rollout:
    """The turns of one rollout. Times are seconds of a monotonic clock."""

    prompt_id: str
    index: int
    limits: Limits
    opened: float
    task: Sequence[Message] = ()
    """The messages that the agent was given."""
    turns: list[AskedTurn] = field(default_factory=list)
    """All answers, trained or not, in the order in which they were sampled; `number` is the index."""
    counts: Counter[str] = field(default_factory=Counter)
    events: list[Mapping[str, Any]] = field(default_factory=list)
    answers_begun: int = 0
    times_asked: Counter[bytes] = field(default_factory=Counter)
    """Number of requests to continue each conversation, by its digest."""
    limited: bool = False
    """True if a limit ended the last request, so that the rollout is truncated."""
    aborted: str = ""
    """The engine's reason for giving up on a turn."""
    _answered: dict[bytes, dict[bytes, AskedTurn]] = field(default_factory=dict)
    """Answers by the digest of a conversation's messages up to and with the answer, and that of its tools."""

    def find(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Match:
        """Matches a request with the rollout's answers."""
        schemas = json.dumps(tools, sort_keys=True, separators=(",", ":"))
        tools_digest = hashlib.blake2b(schemas.encode(), digest_size=DIGEST_BYTES).digest()
        digest, beginning, begun = b"", b"", False
        turn, covered, other_tools = None, 0, False
        for count, message in enumerate(messages, 1):
            begun = begun or message["role"] == "assistant"
            digest = digest_of(digest, message)
            if not begun:
                beginning, begun = digest, message["role"] == "user"
            if answers := self._answered.get(digest):
                other_tools = tools_digest not in answers
                turn, covered = answers.get(tools_digest) or next(reversed(answers.values())), count
        whole = hashlib.blake2b(tools_digest + digest, digest_size=DIGEST_BYTES).digest()
        return Match(turn, covered, other_tools, whole, tools_digest, digest, beginning)

    def add(self, turn: AskedTurn) -> None:
        answers = self._answered.setdefault(digest_of(turn.match.messages, turn.message), {})
        answers.pop(turn.match.tools, None)  # the latest is the last
        answers[turn.match.tools] = turn
        self.turns.append(turn)
        if turn.parent is not None:
            turn.parent.children.append(turn)
        if turn.match.turn is not None:
            turn.match.turn.followed = True

    def unused(self) -> set[AskedTurn]:
        """Returns answers that the agent passed over for another one to the same request. They are not trained."""
        followed = {turn.match.digest for turn in self.turns if turn.followed}
        return {turn for turn in self.turns if not turn.followed and turn.match.digest in followed}

    def paths(self) -> list[PathOfTurns]:
        """Returns a path to each answer that no turn extends (`unused` ones aside), first those from the first root. A
        turn that several paths share is trained in the first."""
        unused, trained, paths = self.unused(), set[AskedTurn](), list[PathOfTurns]()
        leaves = [turn for turn in self.turns if turn not in unused and not set(turn.children) - unused]
        for path in sorted((leaf.path() for leaf in leaves), key=lambda path: (path[0].number, path[-1].number)):
            paths.append([(turn, turn not in trained) for turn in path])
            trained.update(path)
        return paths

    def last_of_task(self) -> AskedTurn | None:
        """Returns the last used answer of the conversation about the task: the earliest one of those that share most
        messages with the task. Edits and tools do not matter."""
        unused = self.unused()
        used = [turn for turn in self.turns if turn not in unused]
        if not used:
            return None
        task = [(message["role"], message.get("content")) for message in self.task]

        def of_task(turn: AskedTurn) -> int:
            given = [(message["role"], message["content"]) for message in turn.given]
            return sum(message in given for message in task)

        first = max((turn for turn in self.turns if turn.match.turn is None), key=of_task)
        return next((turn for turn in reversed(used) if turn.match.beginning == first.match.beginning), None)

    def sample(self, request: Request, finish: FinishReason, turn_rewards: TurnRewards = None) -> Sample:
        """Returns the rollout as the sample of a request. Turn rewards that fit no turn fail the rollout, as any other
        mistake of the agent: its finish is then "abort", and `agent.error` says why."""
        run = self.agent_run(turn_rewards)
        last = self.last_of_task()
        trained = [self.turns[turn.number] for turn in run.turns]
        sets = [(turn.kept, len(turn.sampled)) for turn in trained]
        return Sample(
            prompt_id=request.prompt_id,
            index=request.index,
            tokens=_joined((turn.sampled for turn in trained), np.int32),
            logprobs=_joined((turn.logprobs for turn in trained), np.float32),
            versions=_joined((turn.versions for turn in trained), np.int32),
            finish="abort" if run.error else finish,
            text=last.text if last else "",
            agent=run,
            kept=KeptSets.joined(sets) if any(kept for kept, _ in sets) else None,
        )

    def agent_run(self, turn_rewards: TurnRewards = None) -> AgentRun:
        """Returns the AgentRun. `turn_rewards`: one per answer, in order; or by an answer's id as the agent got it."""
        rewards, error = self._rewards(turn_rewards)
        last, paths, unused = self.last_of_task(), self.paths(), self.unused()
        conversation = last.conversation() if last else []
        counts = self.counts + Counter(
            turns=len(self.turns), turns_unused=len(unused), tokens_unused=sum(len(turn.sampled) for turn in unused)
        )
        return AgentRun(
            branches=tuple(map(self._branch, paths)),
            turns=tuple(
                Turn(turn.number, number, len(turn.sampled), rewards.get(turn.number))
                for number, path in enumerate(paths)
                for turn, trained in path
                if trained
            ),
            messages=tuple(message for turn in conversation for message in (*turn.given, turn.message)),
            error=error,
            counts={name: float(count) for name, count in sorted(counts.items())},
            events=tuple(self.events),
        )

    def _branch(self, path: PathOfTurns) -> Branch:
        marks = [
            np.full(len(part), trained and part is turn.sampled)
            for turn, trained in path
            for part in (turn.added, turn.sampled)
        ]
        rows = [experts for turn, _ in path if (experts := self._experts(turn)) is not None]
        routes = Routes.of(np.concatenate(rows)) if len(rows) == len(path) else None
        return Branch(path[-1][0].tokens(), np.concatenate(marks), routes)

    def _experts(self, turn: AskedTurn) -> np.ndarray | None:
        """Returns the rows of a turn. Raises EngineError if they are not those of its tokens."""
        wanted = len(turn.added) + len(turn.sampled) - (turn.parent is None)
        if turn.experts is not None and len(turn.experts) != wanted:
            where = f"turn {turn.number} of sample {self.index} of prompt {self.prompt_id}"
            needed = f"of the {wanted} that its request reads first"
            raise EngineError(Problem(where, f"routes of {len(turn.experts)} tokens", needed, FIX))
        return turn.experts

    def _rewards(self, given: Any) -> tuple[dict[int, float], str]:
        """Returns rewards by the number of their turn, and an error if they cannot be read."""
        if given is None:
            return {}, ""
        turns = self.turns
        if isinstance(given, Mapping):
            numbers = {turn.answer: turn.number for turn in reversed(turns)}  # of several answers, the first
            numbered = [(numbers.get(str(name)[-16:]), reward) for name, reward in given.items()]
        elif isinstance(given, Sequence) and not isinstance(given, str) and len(given) <= len(turns):
            numbered = list(enumerate(given))
        else:
            return {}, f"turn_rewards: {brief(given)} is not one number for each of {len(turns)} answers"
        rewards = {}
        for number, reward in numbered:
            if number is None or isinstance(reward, bool) or not isinstance(reward, int | float | None):
                return {}, f"turn_rewards: {brief(given)} are not numbers of the {len(turns)} answers"
            if reward is not None and not math.isfinite(reward):
                return {}, f"turn_rewards: {reward} is not finite"
            if reward is not None:
                rewards[number] = float(reward)
        return rewards, ""


def _joined(parts: Iterable[np.ndarray], kind: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, kind), *parts])


def _number(text: str) -> float:
    """Reads 1.0 as 1: clients in JavaScript send it back so."""
    number = float(text)
    return int(number) if number.is_integer() else number


def digest_of(before: bytes, message: Message) -> bytes:
    """Returns the digest of a conversation with one more message. It ignores the ids of calls, the order of keys,
    reasoning, and white space around an answer: not every client sends these back as they were."""
    parts = [message["role"], message.get("name", ""), message["content"]]
    if message["role"] == "assistant":
        functions = [one["function"] for one in message.get("tool_calls", ())]
        calls = json.loads(json.dumps([[of["name"], of["arguments"]] for of in functions]), parse_float=_number)
        parts = [parts[0], json.dumps(calls, sort_keys=True) if calls else "", parts[2].strip()]
    made = hashlib.blake2b(before, digest_size=DIGEST_BYTES)
    for part in parts:
        data = part.encode(errors="surrogatepass")
        made.update(len(data).to_bytes(8, "little"))
        made.update(data)
    return made.digest()


# --- events -----------------------------------------------------------------------------------------------------------

EVENT_LEVELS_MAX = 32
"""Most levels of lists and objects in an event that an agent reports."""

BranchReason = Literal["history", "tools", "fork", "reasoning", "tools_move", "role", "close", "stop_token", "audit"]
"""Reason for which a turn begins a branch; report/text.py (BRANCHES) has the words for each."""


class TurnEvent(TypedDict):
    """An answer of the policy, written by the gateway. `given` and `said` are the messages themselves, not copies."""

    kind: Literal["turn"]
    at: float  # seconds since the rollout was opened, when the request came
    seconds: float  # until its answer was there
    number: int  # as Turn.number
    parent: int | None  # number of the turn that it continues or shares tokens with; None: it begins with its messages
    branch: BranchReason | Literal[""]  # "": the rollout's first turn, or one that extends its parent
    given: list[Mapping[str, Any]]  # messages behind the parent's answer; all messages if it has none
    said: Mapping[str, Any]  # the answer as the agent got it: content, reasoning_content, tool_calls
    finish: str  # of its tokens, as FinishReason
    prompt_tokens: int
    given_tokens: int  # prompt tokens that no engine had seen in this conversation
    tokens: int  # sampled
    unreadable: NotRequired[bool]  # a tool call in it cannot be read


class ToolEvent(TypedDict):
    """A call of a tool, reported by the agent: `endpoint.event("tool", name=…, seconds=…, error=…)`."""

    kind: Literal["tool"]
    at: float  # seconds from the rollout's opening to the report, by the host's or the agent process's clock
    name: str
    seconds: float
    error: NotRequired[str]  # why it failed; "" or missing: it did not
    arguments: NotRequired[Any]
    result: NotRequired[str]


def reported(values: Mapping[str, Any], at: float) -> dict[str, Any]:
    """Returns an event that an agent reports. Any program may report anything: an event of a reserved kind, or a tool's
    call without a name or a time, gets a kind that nothing else has. Levels below EVENT_LEVELS_MAX are left out."""
    kind, seconds = str(values.get("kind")), values.get("seconds")
    timed = isinstance(seconds, int | float) and 0 <= seconds < math.inf
    taken = kind in ("turn", LEFT_OUT) or (kind == "tool" and not (timed and isinstance(values.get("name"), str)))
    return {**_shallow(values, EVENT_LEVELS_MAX), "kind": f"told_{kind}" if taken else kind, "at": at}


def _shallow(value: Any, levels: int) -> Any:
    """Returns a value that checkpoints, traces and reports can write: they recurse into it, and JSON has no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if not isinstance(value, dict | list):
        return value
    if levels == 0:
        return "…"
    if isinstance(value, list):
        return [_shallow(item, levels - 1) for item in value]
    return {name: _shallow(item, levels - 1) for name, item in value.items()}
