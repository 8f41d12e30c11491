"""One request of an agent: from its messages to tokens, from the engine's tokens to messages."""

from __future__ import annotations

import asyncio
import hashlib
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from megagrpo.agents.chat import Chat, Extension
from megagrpo.agents.dialects.chat_request import ChatAnswer, ChatRequest, Choice, Message, Refusal, joined
from megagrpo.agents.tool_calls import parse_answer, parser_of
from megagrpo.agents.turns import AskedTurn, BranchReason, Match, Rollout, TurnEvent
from megagrpo.errors import MegagrpoError, first_line
from megagrpo.rollout.requests import SEED_BITS
from megagrpo.tokenizer import TEMPLATE_ERRORS
from megagrpo.types import FinishReason, Request, Sample

Ask = Callable[[Request, str], Awaitable[Sample]]
"""Sends a request to an engine. The text is the rollout's key: all requests of a rollout go to one engine."""

MODEL = "policy"
"""The name of the policy at the gateway."""
LONG_CHARACTERS = 20_000
"""Length from which a text is encoded in a thread, so that other rollouts' turns go on: it takes about 10 ms."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The prompt of a turn: the tokens of `parent`, then `added`."""

    tokens: tuple[int, ...]
    added: np.ndarray  # int32
    match: Match
    parent: AskedTurn | None
    given: Sequence[Message]
    branch: BranchReason | Literal[""]


class Answers:
    """The gateway's answers to requests. `audited`: the share of extensions compared with a rendered conversation."""

    def __init__(self, chat: Chat, ask: Ask, *, parser: str, audited: float) -> None:
        self._chat, self._ask, self._audited = chat, ask, audited
        self._parser = parser_of(parser, chat)
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encodes long prompts")

    def close(self) -> None:
        self._encoder.shutdown(wait=False, cancel_futures=True)

    async def tokens_of(self, rollout: Rollout, request: ChatRequest) -> int:
        """Returns the number of prompt tokens of this request. Records nothing in the rollout. Raises Refusal."""
        return len((await self._prompt(replace(rollout, counts=Counter()), self._fitted(request))).tokens)

    async def answer(self, key: str, rollout: Rollout, request: ChatRequest) -> ChatAnswer:
        """Generates the answers to a request and appends them to the rollout. Raises Refusal."""
        request = self._fitted(request)
        at = time.monotonic()
        rollout.counts.update(f"ignored/{name}" for name in request.ignored)
        if rollout.aborted:
            raise Refusal(409, "rollout_aborted", f"this rollout has been given up: {rollout.aborted}")
        if rollout.answers_begun + request.answers > (most := rollout.limits.turns_max):
            rollout.limited = True
            raise Refusal(400, "turn_limit_exceeded", f"this rollout has had {rollout.answers_begun} of {most} answers")
        if request.tools and self._parser is None:
            message = "tools: no parser is known for the calls that the chat template writes; see agent.parser"
            raise Refusal(400, "unsupported_parameter", message, "tools")
        rollout.answers_begun += request.answers
        answered = 0
        try:
            prompt = await self._prompt(rollout, request)
            rollout.counts["tokens_read"] += len(prompt.tokens)
            if prompt.branch:
                rollout.counts[f"branch/{prompt.branch}"] += 1
            if prompt.branch and prompt.parent is None:
                rollout.counts["tokens_rerendered"] += len(prompt.tokens)
            limit, capped = self._tokens_max(rollout, request, len(prompt.tokens))
            times = rollout.times_asked[prompt.match.digest]
            rollout.times_asked[prompt.match.digest] += 1
            identity = _digest(prompt.match.digest, f"{rollout.limits.seed}/{times}")
            samples = await self._samples(key, rollout, prompt, identity, limit, request.answers)
            answered = request.answers
        finally:
            rollout.answers_begun -= request.answers - answered
        choices = tuple(
            self._choice(rollout, request, prompt, sample, f"{identity.hex()}/{number}", at, capped=capped)
            for number, sample in enumerate(samples)
        )
        cached = len(prompt.tokens) - len(prompt.added)
        read = array("i", prompt.tokens)  # an answer is kept for a while, in case that a client asks again
        return ChatAnswer(identity.hex()[:16], int(time.time()), request.model or MODEL, read, cached, choices)

    def _fitted(self, request: ChatRequest) -> ChatRequest:
        """Rewrites late system messages (Claude Code and Codex send them) if the template refuses or drops them."""
        late = any(message["role"] == "system" for message in request.messages[1:])
        fits = not late or "system" in self._chat.facts.roles
        return request if fits else replace(request, messages=reminded(request.messages))

    def _tokens_max(self, rollout: Rollout, request: ChatRequest, prompt: int) -> tuple[int, bool]:
        """Returns the most tokens of an answer, and whether the agent's request set it. Raises Refusal."""
        limits = rollout.limits
        most = min(limits.sampling.max_tokens, limits.tokens_max - prompt)
        if most < 1:
            rollout.limited = True
            message = f"the messages are {prompt} tokens, and the maximum context length is {limits.tokens_max} tokens"
            raise Refusal(400, "context_length_exceeded", message, "messages")
        capped = request.tokens_max is not None and request.tokens_max < most
        return (request.tokens_max or most) if capped else most, capped

    # --- from messages to tokens

    async def _prompt(self, rollout: Rollout, request: ChatRequest) -> _Prompt:
        match = rollout.find(request.messages, request.tools)
        turn, new = match.turn, request.messages[match.covered :]
        branch: BranchReason | Literal[""] = ""
        if turn is not None and not match.other_tools:
            system = any(message["role"] == "system" for message in request.messages[: match.covered])
            last = int(turn.sampled[-1])
            try:
                extension = self._chat.extension(
                    turn.message, last, new, request.tools, thought=turn.thought, system=system
                )
            except TEMPLATE_ERRORS:  # the whole conversation may be possible
                extension = "role"
            if isinstance(extension, Extension):
                added = extension.tokens(await self._encode(extension.text))
                if added is None:
                    extension = "stop_token"
                elif self._differs(rollout, request, extension, match.digest):
                    extension = "audit"
                else:
                    tokens = (*turn.tokens().tolist(), *added)
                    return _Prompt(tokens, np.array(added, np.int32), match, turn, new, "fork" if turn.children else "")
            branch = extension
        elif rollout.turns:
            branch = "tools" if turn else "history"
        try:
            text = self._chat.render(request.messages, request.tools)
        except TEMPLATE_ERRORS as error:
            message = f"messages: the chat template refuses them: {first_line(error)}"
            raise Refusal(400, "template_refused", message, "messages") from error
        tokens = tuple(await self._encode(text))
        return _Prompt(tokens, np.array(tokens, np.int32), match, None, new, branch)

    async def _encode(self, text: str) -> list[int]:
        """Encodes a text; long texts in a thread, one at a time. Raises Refusal."""
        try:
            if len(text) < LONG_CHARACTERS:
                return self._chat.encode(text)
            return await asyncio.get_running_loop().run_in_executor(self._encoder, self._chat.encode, text)
        except (TypeError, UnicodeError) as error:  # half of a surrogate pair, which JSON can have
            message = f"messages: the text cannot be encoded: {first_line(error)}"
            raise Refusal(400, "invalid_request", message, "messages") from error

    def _differs(self, rollout: Rollout, request: ChatRequest, extension: Extension, digest: bytes) -> bool:
        """Returns whether an audit finds that the template renders the end of the conversation differently. Audits some
        extensions, and all of a rollout in which one has differed."""
        if digest[0] >= 256 * self._audited and not rollout.counts["audit_differs"]:
            return False
        rollout.counts["audited"] += 1
        try:
            same = self._chat.render(request.messages, request.tools).endswith(extension.text)
        except TEMPLATE_ERRORS:  # such as Llama's, which refuses two calls in an answer
            rollout.counts["audit_differs"] += 1
            return False  # there is nothing that could be asked instead
        rollout.counts["audit_differs"] += not same
        return not same

    # --- the engine

    async def _samples(
        self, key: str, rollout: Rollout, prompt: _Prompt, identity: bytes, limit: int, answers: int
    ) -> list[Sample]:
        sampling = rollout.limits.sampling
        stops = tuple(sorted({*sampling.stop_tokens, *self._chat.stop_tokens}))
        sampling = replace(sampling, max_tokens=limit, stop_tokens=stops)
        # In [0, 2**63). The order of turns, which depends on timing when several agents of a rollout run, is ignored.
        seeds = [int.from_bytes(_digest(identity, f"{n}")[:8], "little") >> (64 - SEED_BITS) for n in range(answers)]
        requests = [Request(rollout.prompt_id, rollout.index, prompt.tokens, seed, sampling) for seed in seeds]
        tasks = [asyncio.ensure_future(self._ask(request, key)) for request in requests]
        try:
            samples = await asyncio.gather(*tasks)
        except MegagrpoError as error:
            rollout.aborted = first_line(error)
            raise Refusal(500, "engine_error", rollout.aborted) from error
        finally:
            for task in tasks:  # all that are left if one failed, or the turn was given up
                task.cancel()
        if any(sample.finish == "abort" or not len(sample.tokens) for sample in samples):
            rollout.aborted = "the engine gave up on a turn"
            raise Refusal(408, "turn_aborted", rollout.aborted)
        return samples

    # --- from tokens to messages

    def _choice(
        self, rollout: Rollout, request: ChatRequest, prompt: _Prompt, sample: Sample, identity: str, at: float,
        *, capped: bool,
    ) -> Choice:  # fmt: skip
        kept, ended, text, stop_string = self._cut(sample, request.stop)
        tokens, logprobs, experts = sample.tokens[:kept], sample.logprobs[:kept], None
        if sample.routes is not None:
            first = max(len(prompt.tokens) - len(prompt.added) - 1, 0)
            experts = sample.routes.experts[first : sample.routes.tokens - (len(sample.tokens) - kept)].copy()
        answer = parse_answer(
            text,
            request.tools,
            self._parser,
            self._chat.facts,
            thinking=self._chat.text(prompt.added[-4:].tolist()).rstrip().endswith(self._chat.facts.thought[0]),
            identity=lambda number: _digest(b"", f"{identity}/{number}").hex()[:9],  # as Mistral's templates want it
        )
        turn = AskedTurn(
            number=len(rollout.turns),
            answer=identity[:16],
            match=prompt.match,
            parent=prompt.parent,
            given=prompt.given,
            message=answer.message,
            added=prompt.added,
            sampled=tokens.astype(np.int32),
            logprobs=logprobs.astype(np.float32),
            versions=sample.versions[:kept].astype(np.int32),
            finish=ended,
            text=text,
            thought=answer.thought or (prompt.parent is not None and prompt.parent.thought),
            experts=experts,
            kept=sample.kept and sample.kept.part(0, kept),
        )
        rollout.add(turn)
        rollout.limited = ended == "length" and not capped
        rollout.counts["calls"] += len(answer.message.get("tool_calls", ()))
        rollout.counts["unreadable_calls"] += answer.unreadable
        rollout.events.append(_event(rollout, turn, prompt, at, unreadable=answer.unreadable))
        finish: Literal["stop", "length", "tool_calls"] = "stop" if ended == "stop" else "length"
        return Choice(
            message=answer.message,
            finish="tool_calls" if answer.message.get("tool_calls") else finish,
            tokens=tokens.tolist(),
            logprobs=logprobs.tolist(),
            texts=[self._chat.text([token]) for token in tokens.tolist()] if request.logprobs else (),
            stop_string=stop_string,
            unreadable=answer.unreadable,
        )

    def _cut(self, sample: Sample, stop: Sequence[str]) -> tuple[int, FinishReason, str, str]:
        """Cuts an answer after the first token that completes a stop string. Returns the number of its tokens, the
        finish reason, the text without the stop string, and that string. The result is what an engine that looks for
        the strings would have sampled, since stopping depends on the tokens before only."""
        tokens = sample.tokens.tolist()
        body = tokens[:-1] if sample.finish == "stop" and tokens[-1] in self._chat.stop_tokens else tokens
        text = self._chat.text(body)
        if not any(string in text for string in stop):
            return len(tokens), sample.finish, text, ""
        low, high = 1, len(body)
        while low < high:  # the fewest tokens whose text has a stop string
            middle = (low + high) // 2
            begun = self._chat.text(body[:middle])
            low, high = (low, middle) if any(string in begun for string in stop) else (middle + 1, high)
        text = self._chat.text(body[:low])
        at, string = min((at, string) for string in stop if (at := text.find(string)) >= 0)
        return low, "stop", text[:at], string


def reminded(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Rewrites system messages after the first message as the user's, as Claude Code and Codex do for APIs without."""
    return joined(
        {"role": "user", "content": f"<system-reminder>\n{message['content']}\n</system-reminder>"}
        if number and message["role"] == "system"
        else message
        for number, message in enumerate(messages)
    )


def _event(rollout: Rollout, turn: AskedTurn, prompt: _Prompt, at: float, *, unreadable: bool) -> TurnEvent:
    near = prompt.parent or prompt.match.turn
    event: TurnEvent = {
        "kind": "turn",
        "at": at - rollout.opened,
        "seconds": time.monotonic() - at,
        "number": turn.number,
        "parent": near.number if near else None,
        "branch": prompt.branch,
        "given": list(turn.given),
        "said": turn.message,
        "finish": turn.finish,
        "prompt_tokens": len(prompt.tokens),
        "given_tokens": len(prompt.added),
        "tokens": len(turn.sampled),
    }
    return event | {"unreadable": True} if unreadable else event


def _digest(before: bytes, text: str) -> bytes:
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()
