"""The turns of an agent's rollouts, and their cost in an engine's time: rollouts wait for tools between answers, and
each turn reads what is new."""

from __future__ import annotations

from dataclasses import dataclass

from megagrpo.plan.assumptions import Assumptions, Lengths
from megagrpo.plan.engine import EngineSpeed
from megagrpo.recipe.schema import Recipe

HALVINGS = 40
"""Bisection steps of the search for the number of answers that are decoded at once."""


@dataclass(frozen=True)
class Turns:
    """The rollouts on one engine, and their turns. Tokens and seconds are means over turns."""

    conversations: float
    """Rollouts that have begun and not ended."""

    slots: float
    """Answers that the engine decodes at once."""

    tokens: float
    """Sampled tokens."""

    new: float
    """Tokens before an answer that no engine has seen: results of tools, and what the template writes around them."""

    again: float
    """Tokens before an answer whose keys and values are not in the engine's cache any more."""

    history: float
    """Tokens of a conversation when a turn begins."""

    wait: float
    """Seconds in which tools and the agent work, from an answer to the next request."""

    reuse: float
    """Share of the tokens of histories that are found in the cache."""

    cached: float
    """Conversations that the cache has room for, at most all."""

    @classmethod
    def of(
        cls, recipe: Recipe, lengths: Lengths, assumed: Assumptions, engines: int, slots: float, cache_tokens: float
    ) -> Turns | None:
        """Returns the turns on one engine; None without an agent. slots: of an engine. cache_tokens: the size of its
        cache; 0 if it keeps nothing from one request to the next.

        If not all conversations fit into the cache, the histories of those that fit are taken to be found.
        """
        if recipe.agent is None:
            return None
        of_engine = recipe.prompts_at_once * recipe.rollout.samples_per_prompt / engines
        conversations = max(1.0, min(recipe.agent.rollouts_at_once / engines, of_engine))
        turns, growth = lengths.turns, 1 + lengths.given
        whole = lengths.prompt + lengths.response * growth
        history = (lengths.prompt + whole) / 2
        cached = min(conversations, cache_tokens / history)
        reuse = assumed.prefix_share * cached / conversations
        later = (turns - 1) / turns  # the first turn reads the prompt
        return cls(
            conversations=conversations,
            slots=slots,
            tokens=lengths.turn,
            new=lengths.response * lengths.given / turns,
            again=later * (1 - reuse) * history,
            history=history,
            wait=assumed.tool_seconds * later,
            reuse=reuse,
            cached=cached,
        )

    def pace(self, engine: EngineSpeed, running: float, context: float) -> tuple[float, float, float]:
        """Returns the seconds in which each of `running` conversations gets one sampled token after `context` tokens.
        Three parts: its own decoding, the engine's reading for other conversations, and the wait for tools or for a
        place in the decoded batch."""
        read = self.read_seconds(engine) / self.tokens

        def of_token(batch: float) -> float:
            return engine.decode_seconds(batch, context) + batch * read

        # As many are decoded as the others, which wait for tools, leave over: the more, the longer an answer takes.
        low, high = 0.0, min(running, self.slots)
        for _ in range(HALVINGS if self.wait else 0):
            batch = (low + high) / 2
            seconds = self.tokens * of_token(max(1.0, batch))
            low, high = (batch, high) if running * seconds / (seconds + self.wait) > batch else (low, batch)
        batch = max(1.0, high) if running > 1 else 1.0
        decoded, reading = engine.decode_seconds(batch, context), batch * read
        whole = max(running / batch * (decoded + reading), decoded + reading + self.wait / self.tokens)
        return decoded, reading, whole - decoded - reading

    def read_seconds(self, engine: EngineSpeed) -> float:
        """Returns the seconds to read what is new to the engine before a turn, behind a history."""
        if not (tokens := self.new + self.again):
            return 0.0
        return engine.prefill_seconds(tokens, tokens**2 + 2 * tokens * max(0.0, self.history - self.again), 1)
