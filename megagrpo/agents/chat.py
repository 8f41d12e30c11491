"""The text that a new turn adds to a conversation, by any chat template and without a table of model families.

The template is asked, once at the start, how it ends an assistant's message and what it does to earlier messages
(`Facts`). A turn is then rendered behind a stand-in of two messages for everything before it: its cost does not grow
with the conversation, and no token of an earlier turn is rendered or encoded again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from megagrpo.agents.dialects.chat_request import Message, call, with_text_arguments
from megagrpo.agents.turns import BranchReason
from megagrpo.errors import first_line
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.agent import AgentConfig
from megagrpo.tokenizer import TEMPLATE_ERRORS, end_tokens, load_chat_tokenizer

MARK, END = "Zq7f", "Xj8w"  # words that no template writes by itself
THOUGHT = MARK[::-1]
SYSTEM: Message = {"role": "system", "content": "s"}
USER: Message = {"role": "user", "content": "u"}
CALL = call("call00001", "f", {"k": "v"})
PARAMETERS = {"type": "object", "properties": {"k": {"type": "string", "description": "k"}}, "required": ["k"]}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}
THINK = ("<think>", "</think>")
WRITTEN_THOUGHT = re.compile(rf"((?:<\|channel\|>\w+)?<[^<>]*>|\[[^][]*\])\s*{THOUGHT}\s*(<[^<>]*>|\[[^][]*\])")

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Facts:
    """The behaviour of a chat template. `roles` are those that may follow an assistant's message."""

    closes_with: str  # text of the stop token that ends an assistant's message; "" if no stop token does
    roles: frozenset[str]
    reasoning_field: bool  # it reads reasoning_content, or thinking; otherwise thoughts are left in the content
    thought: tuple[str, str]  # the marks that it writes around one
    drops_reasoning: frozenset[str]  # roles whose message makes the template leave out earlier reasoning
    moves: frozenset[str]  # roles whose message makes it write earlier messages elsewhere or not at all
    moves_system: frozenset[str]  # the same, if there is a system message
    moves_tools: frozenset[str]  # the same, if there are tools
    several_calls: bool  # an answer can have several tool calls
    refused: Mapping[str, str]  # role: what the template said


@dataclass(frozen=True)
class Extension:
    """The text that follows an answer, up to and with the generation prompt. It begins with the token that ends the
    answer; `sampled` says whether the policy has sampled this token, so that it is not added again."""

    text: str
    first: tuple[int, ...]  # one of these must be the text's first token
    sampled: bool

    def tokens(self, encoded: Sequence[int]) -> list[int] | None:
        """Returns the tokens to append, from the text's; None if the text's first token does not end the answer."""
        if not encoded or encoded[0] not in self.first:
            return None
        return list(encoded[1 if self.sampled else 0 :])


class Chat:
    """A tokenizer with a chat template. `stop_tokens` end an answer, and so does the tokenizer's own end of sequence.
    `history`: see AgentConfig."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_tokens: Sequence[int],
        *,
        history: Literal["template", "append"] = "template",
        **template_arguments: Any,
    ) -> None:
        self.tokenizer, self._history = tokenizer, history
        self.stop_tokens = tuple(sorted({*stop_tokens, tokenizer.eos_token_id} - {None}))
        self._arguments = template_arguments
        self._stops = {token: self.text([token]) for token in self.stop_tokens}
        written = {*tokenizer.get_added_vocab().values(), *tokenizer.all_special_ids}
        self._plain = {token for token in self.stop_tokens if token not in written}
        self._as_text = False
        asked = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
        if not _rendered(self, asked, [TOOL]):
            self._as_text = True  # DeepSeek's templates join arguments with text
            self._as_text = bool(_rendered(self, asked, [TOOL]))
        self.facts = _facts(self)

    def render(self, messages: Sequence[Message], tools: Tools = (), *, prompt: bool = True) -> str:
        """Renders the whole conversation, with the generation prompt if `prompt`. Raises what the template raises."""
        named = [
            {**message, "thinking": message["reasoning_content"]} if "reasoning_content" in message else message
            for message in messages
        ]  # some templates read a thought by this name
        if self._as_text:
            named = list(map(with_text_arguments, named))
        return str(
            self.tokenizer.apply_chat_template(
                named, tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt,
                **self._arguments,
            )
        )  # fmt: skip

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))  # the template has written special tokens

    def text(self, tokens: Sequence[int]) -> str:
        """Decodes tokens, special ones included. Bytes that are no UTF-8 become U+FFFD."""
        return str(self.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    def extension(
        self,
        answer: Message,
        last: int,
        new: Sequence[Message],
        tools: Tools = (),
        *,
        thought: bool = False,
        system: bool = False,
    ) -> Extension | BranchReason:
        """Returns the text that follows an answer, or the reason why the whole conversation has to be rendered.

        Reads only the calls of the `answer` (a template may look up their names and ids). `last` is its last
        token: the one that ends it, or another one if it was cut off. `thought`: it or an earlier turn has reasoning
        in its tokens. `system`: the conversation has a system message. Raises what the template raises.
        """
        facts, roles = self.facts, {message["role"] for message in new}
        if not facts.closes_with:
            return "close"
        if not roles or roles - facts.roles:
            return "role"
        if thought and self._history == "template" and roles & facts.drops_reasoning:
            return "reasoning"
        if roles & facts.moves or (tools and roles & facts.moves_tools) or (system and roles & facts.moves_system):
            return "tools_move"
        calls = answer.get("tool_calls", ())
        after = self.after(calls, new, tools)
        sampled = last in self._stops
        if after is None or (sampled and not after.startswith(self._stops[last])) or (calls and last in self._plain):
            return "stop_token"
        # The text begins with a special token and is encoded with it: behind nothing, SentencePiece adds a space.
        return Extension(after, (last,) if sampled else self.stop_tokens, sampled)

    def after(self, calls: Sequence[Mapping[str, Any]], new: Sequence[Message], tools: Tools) -> str | None:
        """Returns the text from the token that ends an answer with these calls to the generation prompt's end; None
        if no stop token ends it. A stop token of plain text, such as a newline, may also be how a template writes a
        call: it counts behind an answer without calls only."""
        stand_in: dict[str, Any] = {"role": "assistant", "content": "c" if calls else END}
        if calls:
            last = len(calls) - 1
            stand_in["tool_calls"] = [
                call(one["id"], one["function"]["name"], {"k": END} if number == last else {})
                for number, one in enumerate(calls)
            ]
        whole = self.render([USER, stand_in, *new], tools)
        end = whole.find(END)
        stops = [stop for token, stop in self._stops.items() if not calls or token not in self._plain]
        ends = [at for stop in stops if (at := whole.find(stop, end)) >= 0]
        return whole[min(ends) :] if ends and end >= 0 else None


def chat_of(recipe: Recipe, agent: AgentConfig, tokenizer_directory: Path) -> Chat:
    """Returns an agent's tokenizer and template, with every token that ends an answer. Raises ModelError if there is no
    tokenizer with a chat template."""
    tokenizer = load_chat_tokenizer(tokenizer_directory, recipe.model.chat_template)
    ends = (end_tokens(directory, tokenizer) for directory in (tokenizer_directory, recipe.model.path))
    stops = set(recipe.rollout.stop_token_ids).union(*ends)
    return Chat(tokenizer, sorted(stops), history=agent.history, **agent.template_arguments)


def _facts(chat: Chat) -> Facts:
    """Tests the template with conversations of a few messages. Anything that it refuses counts as unsupported."""
    closes, refused = "", {}
    traits: dict[str, set[str]] = {}
    for role, calls in (("user", {}), ("tool", {"tool_calls": [CALL]}), ("system", {})):
        new: Message = {"role": role, "content": MARK} | ({"tool_call_id": CALL["id"]} if role == "tool" else {})
        try:
            after, written, of_role = _ask(chat, new, {"role": "assistant", "content": "c", **calls})
        except TEMPLATE_ERRORS as error:
            refused[role] = first_line(error)
            continue
        # Without a stop token, questions are rendered with the whole conversation; late system messages need not be.
        if MARK in (after or ("" if role == "system" else written)) and END not in (after or ""):
            stops = [chat.text([token]) for token in chat.stop_tokens]
            closes = closes or next((stop for stop in stops if after and after.startswith(stop)), "")
            traits[role] = of_role
    two = [call(CALL["id"], "f", {"k": mark}) for mark in (MARK, END)]
    thinking = {"role": "assistant", "content": "c", "reasoning_content": THOUGHT}
    both, thought = (
        _rendered(chat, [USER, said], [TOOL])
        for said in ({"role": "assistant", "content": "", "tool_calls": two}, thinking)
    )
    marks = WRITTEN_THOUGHT.search(thought)

    def roles(trait: str) -> frozenset[str]:
        return frozenset(role for role, of_role in traits.items() if trait in of_role)

    return Facts(
        closes_with=closes,
        roles=frozenset(traits),
        reasoning_field=bool(roles("reads field")),
        thought=(marks[1], marks[2]) if marks else THINK,
        drops_reasoning=roles("drops field" if roles("reads field") else "drops text"),
        moves=roles("moves"),
        moves_system=roles("moves system"),
        moves_tools=roles("moves tools"),
        several_calls=MARK in both and END in both,
        refused=refused,
    )


def _rendered(chat: Chat, messages: Sequence[Message], tools: Tools = ()) -> str:
    """Renders a conversation without generation prompt; "" if the template refuses it."""
    try:
        return chat.render(messages, tools, prompt=False)
    except TEMPLATE_ERRORS:
        return ""


def _ask(chat: Chat, new: Message, assistant: Message) -> tuple[str | None, str, set[str]]:
    """Returns the text that follows the answer when `new` does, the whole conversation, and the traits of the template:
    the forms of a thought ("field", "text") that it reads and drops, and the conversations whose earlier messages it
    moves."""
    tools = [TOOL] if new["role"] == "tool" else []
    after, traits = chat.after(assistant.get("tool_calls", ()), [new], tools), set[str]()
    for form, thought in (
        # Beside a call, some templates take either a thought or content.
        ("field", {"reasoning_content": THOUGHT, "content": "" if "tool_calls" in assistant else "c"}),
        ("text", {"content": f"{THINK[0]}\n{THOUGHT}\n{THINK[1]}\n\nc"}),
    ):
        thinking = {**assistant, **thought}
        # Qwen3 drops it before the next question; other templates may do so only after the next answer.
        later = [
            chat.render([USER, thinking, new], tools),
            chat.render([USER, thinking, new, assistant, new], tools),
        ]
        if any(THOUGHT not in whole for whole in later):
            traits.add(f"drops {form}")
        if any(THOUGHT in whole for whole in [*later, chat.render([USER, thinking], tools, prompt=False)]):
            traits.add(f"reads {form}")
    for trait, base, given in (
        ("moves", [USER], []), ("moves tools", [USER], [TOOL]), ("moves system", [SYSTEM, USER], []),
    ):  # fmt: skip
        before = _rendered(chat, base, given)  # "": a template without system messages or tools, which cannot move
        if before and not chat.render([*base, assistant, new], given).startswith(before):
            traits.add(trait)
    return after, chat.render([USER, assistant, new], tools), traits
