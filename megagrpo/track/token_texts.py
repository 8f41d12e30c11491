"""The text that each token id adds: the texts of a response, concatenated, equal the response decoded at once."""

from __future__ import annotations

import codecs
import re
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from megagrpo.track.rollout_files import encodable

INCOMPLETE = "\ufffd"
"""The replacement for bytes that are no character."""
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
UNKNOWN = -1


class TokenTexts:
    """The text pieces of a tokenizer's tokens. Each token is decoded once, whatever its number of occurrences.

    Of several tokens that make up a character's bytes, the last adds the character, and the others add nothing.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # Some tokenizers drop a space in front of the first token.
        self._anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._before = self._decoded([self._anchor])[0]
        self._slots = np.full(1, UNKNOWN, np.int64)  # of each token id in `_texts`
        self._partial = np.zeros(1, bool)  # by token id
        self._texts = pa.array([], pa.string())
        self._parts: dict[int, bytes] = {}  # bytes of the tokens that are no whole text by themselves
        self._falls_back = False

    def pieces(self, tokens: np.ndarray, offsets: np.ndarray) -> pa.Array:
        """Returns string [tokens]. tokens: int32 [tokens] of all responses; offsets: int64 [responses + 1] (Ragged)."""
        self._learn(tokens)
        texts = self._texts.take(pa.array(self._slots[tokens]))
        if not self._parts:
            return texts
        partial = self._partial[tokens]
        at = np.flatnonzero(partial)
        if not len(at):
            return texts
        begins = np.zeros(len(tokens) + 1, bool)
        begins[offsets] = True
        # A run of such tokens ends before a token that is whole, and with its response.
        first = np.concatenate([[True], (np.diff(at) > 1) | begins[at[1:]]])
        made: list[str] = []
        for run in np.split(at, np.flatnonzero(first)[1:]):
            made += _characters([self._parts[token] for token in tokens[run].tolist()], self._falls_back)
        return pc.replace_with_mask(texts, pa.array(partial), pa.array(made, pa.string()))

    def _learn(self, tokens: np.ndarray) -> None:
        """Decodes the tokens that are new."""
        most = int(tokens.max(initial=0))
        if most >= len(self._slots):
            more = 2 * most + 1 - len(self._slots)
            self._slots = np.concatenate([self._slots, np.full(more, UNKNOWN, np.int64)])
            self._partial = np.concatenate([self._partial, np.zeros(more, bool)])
        new = np.unique(tokens[self._slots[tokens] == UNKNOWN]).tolist()
        if not new:
            return
        after, alone = self._decoded([[*self._anchor, token] for token in new]), self._decoded([[t] for t in new])
        texts = [
            joined[len(self._before) :] if joined.startswith(self._before) else text
            for joined, text in zip(after, alone, strict=True)
        ]
        names = self._tokenizer.convert_ids_to_tokens(new)
        for token, name, text in zip(new, names, texts, strict=True):
            if (found := BYTE.fullmatch(str(name))) and text != name:
                self._parts[token], self._falls_back = bytes([int(found[1], 16)]), True
            elif INCOMPLETE in text:
                self._parts[token] = _bytes(str(name), text)
        self._partial[list(self._parts)] = True
        self._slots[new] = np.arange(len(self._texts), len(self._texts) + len(new))
        self._texts = pa.concat_arrays([self._texts, pa.array([encodable(text) for text in texts], pa.string())])

    def _decoded(self, tokens: list[list[int]]) -> list[str]:
        return self._tokenizer.batch_decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _characters(parts: list[bytes], falls_back: bool) -> list[str]:
    """Returns the text that each part adds. Where bytes stand in for unknown characters (falls_back), decoders take all
    of them or none."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict" if falls_back else "replace")
    try:
        return [decoder.decode(part, final=at == len(parts)) for at, part in enumerate(parts, 1)]
    except UnicodeDecodeError:
        return [INCOMPLETE] * len(parts)


def _bytes(name: str, text: str) -> bytes:
    """Returns the bytes of a token of a byte-level vocabulary; of another vocabulary, those of its text."""
    alphabet = byte_alphabet()
    known = all(letter in alphabet for letter in name)
    return bytes(alphabet[letter] for letter in name) if known else text.encode(errors="replace")


@cache
def byte_alphabet() -> dict[str, int]:
    """Returns the byte of each letter of a byte-level vocabulary (GPT-2's, and those after it)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), ord("\xff") + 1)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + at): byte for at, byte in enumerate(others)}
