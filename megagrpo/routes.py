"""Routes: the experts that an engine chose for each token that it read, and a digest of them.

Row i has the experts of token i of a sequence, in the pass that read it. The last token is never read before it is
trained on: n tokens have n - 1 rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megagrpo.errors import EngineError, Problem

GAMMA, MIX_1, MIX_2 = (np.uint64(bits) for bits in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Constants of SplitMix64 (splitmix64.py)."""
FIX = "report it with the engine's log; algorithm.routing: own trains without routes"
PIECES, PIECE = (0, 22, 44), np.uint64(2**22 - 1)
ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of a sequence's tokens in every layer that has experts, in the order of the engine's slots."""

    experts: np.ndarray  # uint8 or uint16 [tokens read, sparse layers, experts per token]
    digest: int  # of all of them, as digest_of makes it

    @classmethod
    def of(cls, experts: np.ndarray) -> Routes:
        """Packs indices of experts, of any integer type, into the fewest bytes, and makes their digest."""
        return cls.of_each(experts, np.array([len(experts)]))[0]

    @classmethod
    def of_each(cls, experts: np.ndarray, lengths: np.ndarray) -> list[Routes]:
        """Does as `of` for several sequences end to end, of which each has as many rows as `lengths` says."""
        packed = np.ascontiguousarray(experts, np.uint8 if experts.max(initial=0) < 2**8 else np.uint16)
        ends = np.cumsum(lengths)
        starts, layers = ends - lengths, np.arange(experts.shape[1])
        parts = token_digests(packed, np.arange(len(packed)) - np.repeat(starts, lengths), layers)
        sums = np.concatenate([np.zeros(1, np.uint64), parts.cumsum(dtype=np.uint64)])
        parts_of = zip(starts.tolist(), ends.tolist(), (sums[ends] - sums[starts]).tolist(), strict=True)
        return [cls(packed[start:end], digest) for start, end, digest in parts_of]

    @property
    def tokens(self) -> int:
        """Returns the number of tokens that have a row."""
        return len(self.experts)

    def require_rows(self, where: str, tokens: int) -> None:
        """Raises EngineError unless there is a row for each of `tokens` that were read."""
        if self.tokens != tokens:
            raise EngineError(Problem(where, f"routes of {self.tokens} tokens", f"of the {tokens} that were read", FIX))

    def joined(self, later: Routes, where: str) -> Routes:
        """Keeps these rows, and adds those of `later`, a pass over the same sequence, for the tokens behind them.

        As their digest is a new one, it raises EngineError if these rows are not as theirs says.
        """
        self._require_digest(where)
        return Routes.of(np.concatenate([self.experts, later.experts[self.tokens :]]))

    def before(self, tokens: int, where: str) -> Routes:
        """Returns the routes of a sequence that ends after this many tokens. Raises EngineError as `joined` does."""
        if tokens - 1 >= self.tokens:
            return self
        self._require_digest(where)
        return Routes.of(self.experts[: max(tokens - 1, 0)])

    def _require_digest(self, where: str) -> None:
        if digest_of(self.experts) != self.digest:
            raise EngineError(Problem(where, "routes with another digest", "those that the engine sent", FIX))


@dataclass(frozen=True, slots=True)
class RouteSizes:
    """The sizes of a model's routes."""

    layers: int  # that have experts
    per_token: int
    experts: int  # of a layer

    @property
    def token_bytes(self) -> int:
        """Returns the bytes of a token's row, at most: Routes.of packs a sequence into one byte an expert if it can."""
        return self.layers * self.per_token * (1 if self.experts <= 2**8 else 2)

    def fit(self, experts: np.ndarray) -> bool:
        """Returns whether any number of tokens can have these experts, as `require` says."""
        return experts.shape[1:] == (self.layers, self.per_token) and not self._wrong(experts).any()

    def require(self, experts: np.ndarray, where: str, tokens: int) -> None:
        """Raises EngineError unless `tokens` that were read can have these experts, of any integer type: for another
        number of rows, layers or experts, for an expert that is not there, and for one that a token has twice."""
        shape, wanted = experts.shape, (tokens, self.layers, self.per_token)
        if shape != wanted:
            needed = f"{wanted[0]} tokens read x {self.layers} layers x {self.per_token} experts"
            raise EngineError(Problem(where, f"routes of {' x '.join(map(str, shape))}", needed, FIX))
        wrong = self._wrong(experts)
        if wrong.any():
            token, layer = np.argwhere(wrong)[0].tolist()
            chosen = experts[token, layer].tolist()
            given = f"experts {chosen} of token {token}, in layer {layer} of those with experts"
            raise EngineError(Problem(where, given, f"{self.per_token} different ones of {self.experts}", FIX))

    def _wrong(self, experts: np.ndarray) -> np.ndarray:
        ordered = np.sort(experts, axis=-1)
        twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
        return twice | (ordered[..., 0] < 0) | (ordered[..., -1] >= self.experts)


def digest_of(experts: np.ndarray) -> int:
    """Returns the digest of routes [tokens, layers, experts per token]: the sum of token_digests, modulo 2^64."""
    tokens, layers = np.arange(len(experts)), np.arange(experts.shape[1])
    return int(token_digests(experts, tokens, layers).sum(dtype=np.uint64))


def token_digests(experts: np.ndarray, tokens: np.ndarray, layers: np.ndarray) -> np.ndarray:
    """Returns the part of each token in its sequence's digest, for some of the layers: uint64 [tokens].

    experts: [tokens, layers, experts per token]; tokens: int64 [tokens], their places in the sequence; layers: int64
    [layers], their places among those with experts. A part is the sum of (expert + 1) w(token) w(layer) w(slot), with
    odd w, modulo 2^64: parts of ranks that hold other tokens or layers add up to the digest of the whole.
    """
    pieces = _weight_pieces(tuple(layers.tolist()), experts.shape[2])
    sums = np.zeros(len(experts), np.uint64)
    for first in range(0, len(experts), ROWS_AT_ONCE):
        some = experts[first : first + ROWS_AT_ONCE]
        rows = some.reshape(len(some), len(pieces)).astype(np.float64) + 1
        for start, of_piece in zip(PIECES, (rows @ pieces).T, strict=True):
            sums[first : first + len(rows)] += of_piece.astype(np.uint64) << np.uint64(start)
    return sums * _odd(tokens, 1)


@lru_cache
def _weight_pieces(layers: tuple[int, ...], slots: int) -> np.ndarray:
    """Returns w(layer) w(slot) in pieces, float64 [layers x slots, pieces]: products of them are exact below 2^53, and
    many times as fast as those of integers."""
    weights = (_odd(np.array(layers, np.int64), 2)[:, None] * _odd(np.arange(slots), 3)).ravel()
    return np.stack([(weights >> np.uint64(start)) & PIECE for start in PIECES], 1).astype(np.float64)


def _odd(indices: np.ndarray, axis: int) -> np.ndarray:
    """Returns an odd number for each index, uint64 [indices]: outputs of SplitMix64."""
    bits = (indices.astype(np.uint64) * np.uint64(4) + np.uint64(axis)) * GAMMA
    bits = (bits ^ (bits >> np.uint64(30))) * MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * MIX_2
    return (bits ^ (bits >> np.uint64(31))) | np.uint64(1)
