"""One batch from prompts to responses: each prompt is read once, its samples are decoded together, ended rows leave. A
response that has begun resumes as a part of its prompt.

Keys and values lie in storage that grows in steps, with one row per prompt and then one per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache, DynamicLayer, get_layer_types_and_kwargs

from megagrpo.errors import DIVERGED_FIX, EngineError, Problem
from megagrpo.rollout.read_routes import ReadRoutes
from megagrpo.rollout.requests import after_begun
from megagrpo.routes import Routes
from megagrpo.splitmix64 import GAMMA, mixed, shifted
from megagrpo.types import FinishReason, KeptSets, Request, Sample, SamplingParams

GROWTH_TOKENS = 32  # smallest step by which the cache grows; larger ones are half of what is in use
COMPACT_BELOW = 0.75  # ended rows are dropped once fewer than this share of the batch still runs


def decode(
    model: Any, record: Record, stop_tokens: Collection[int], before_step: Callable[[], int | None], name: str
) -> None:
    """Decodes the requests of `record`, which other threads may read meanwhile. All have the same sampling parameters,
    but for max_tokens.

    before_step is called before each step of the model, and returns the version of its weights. If it returns None,
    all rows end with the tokens that they have. `name` is that of the engine: EngineError, for logits that are NaN or
    infinite, names it and a row.

    `model` is a causal language model of transformers, in eval mode. Its layers attend to all tokens or to a window, or
    keep a state. Prompts are padded on the left, so that all rows write the same column of the cache. Padding is
    masked, and positions count from each prompt's first token. To be called without gradients.
    """
    device, requests, sampling = model.device, record.requests, record.requests[0].sampling
    prompts = list(dict.fromkeys(request.read for request in requests))
    place = {prompt: index for index, prompt in enumerate(prompts)}
    prompt_of = torch.tensor([place[request.read] for request in requests], device=device)
    begun = [request.sampling.max_tokens - request.tokens_left for request in requests]
    seeds = [request.seed for request in requests]
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    limit = int(lengths.max()) + max(request.sampling.max_tokens for request in requests)
    cache = _empty_cache(model, limit)
    if (version := before_step()) is None:
        return
    logits = _prefill(model, cache, prompts, lengths)[prompt_of]
    cache.reorder_cache(prompt_of)
    padding = cache.get_seq_length() - lengths[prompt_of]
    if record.routes is not None:
        record.routes.add_prompts(lengths.tolist(), prompt_of.tolist())
    batch = _Batch(cache, torch.tensor(seeds, device=device), padding, torch.tensor(begun, device=device))
    stops = np.array(sorted(stop_tokens), dtype=np.int64)

    for position in range(record.longest):
        if (slots := broken(logits, sampling.temperature).nonzero()).numel():
            at = requests[record.row_of_slot[int(slots[0])]]
            of = f"{name}: sample {at.index} of prompt {at.prompt_id}, by weights of version {version}"
            where = f"{of}: token {position + 1} of its response"
            raise EngineError(Problem(where, "logits that are NaN or infinite", "finite numbers", DIVERGED_FIX))
        tokens, logprobs, kept = draw(logits, uniforms(batch.seeds, batch.begun + position), sampling)
        if kept is not None:
            record.keep_sets(kept.cpu().numpy())
        running = record.add(position, tokens.cpu().numpy(), logprobs.cpu().numpy(), version, stops)
        if not running.any() or (version := before_step()) is None:
            return
        if running.sum() < COMPACT_BELOW * len(running):
            going_on = torch.from_numpy(running.nonzero()[0]).to(device)
            batch.keep(going_on)
            record.keep(running)
            tokens = tokens[going_on]
        logits = batch.step(model, tokens)
        if record.routes is not None:
            record.routes.add_step(record.row_of_slot)


def _prefill(model: Any, cache: Cache, prompts: Sequence[Sequence[int]], lengths: torch.Tensor) -> torch.Tensor:
    """Fills the cache with all prompts and returns the logits [prompts, vocab] after the last token of each."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
    padding = width - lengths
    column = torch.arange(width, device=model.device)
    # The last column by index: 1 would make a view of it, for which torch copies the head's weights for each prompt.
    return model(
        input_ids=ids,
        attention_mask=column >= padding[:, None],
        position_ids=(column - padding[:, None]).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=column[-1:],
    ).logits[:, -1]


@dataclass
class _Batch:
    """The rows that still occupy the model: their cache, seeds, left padding and tokens sampled before, all int64
    [rows]."""

    cache: Cache
    seeds: torch.Tensor
    padding: torch.Tensor
    begun: torch.Tensor

    def keep(self, rows: torch.Tensor) -> None:
        self.cache.reorder_cache(rows)
        self.seeds, self.padding, self.begun = self.seeds[rows], self.padding[rows], self.begun[rows]

    def step(self, model: Any, tokens: torch.Tensor) -> torch.Tensor:
        """Appends one token to every row and returns the logits [rows, vocab] after it."""
        column = self.cache.get_seq_length()
        visible = torch.arange(column + 1, device=tokens.device) >= self.padding[:, None]
        # From this, transformers makes the mask of each layer type. One for all layers it takes as it is.
        if model.config._attn_implementation == "sdpa" and not any(self.cache.is_sliding):
            visible = visible[:, None, None]
        return model(
            input_ids=tokens[:, None],
            attention_mask=visible,
            position_ids=(column - self.padding)[:, None],
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]


class Record:
    """The tokens of a batch, on the host, a row for each request. A slot whose row has ended continues, unrecorded,
    until it is dropped."""

    def __init__(self, requests: Sequence[Request], routes: ReadRoutes | None = None) -> None:
        self.requests, self.routes = requests, routes
        self.limits = np.array([request.tokens_left for request in requests])
        rows, self.longest = len(requests), int(self.limits.max())
        self.tokens = np.zeros((rows, self.longest), dtype=np.int32)
        self.logprobs = np.zeros((rows, self.longest), dtype=np.float32)
        self.versions = np.zeros((rows, self.longest), dtype=np.int32)
        self.lengths = np.zeros(rows, dtype=np.int64)
        self.stopped = np.zeros(rows, dtype=bool)
        self.row_of_slot = np.arange(rows)
        self.sets: list[list[np.ndarray]] | None = [[] for _ in requests] if requests[0].sampling.kept_sets else None

    def keep_sets(self, kept: np.ndarray) -> None:
        """Records the kept sets of what `add` is about to record, bool [slots, vocab]."""
        if self.sets is not None:
            for row, ids in zip(self.row_of_slot, kept, strict=True):
                self.sets[row].append(ids.nonzero()[0].astype(np.int32))

    def add(
        self, position: int, tokens: np.ndarray, logprobs: np.ndarray, version: int, stops: np.ndarray
    ) -> np.ndarray:
        """Records what each slot drew; returns which slots continue, bool [slots]."""
        running = self._running()
        rows = self.row_of_slot[running]
        self.tokens[rows, position] = tokens[running]
        self.logprobs[rows, position] = logprobs[running]
        self.versions[rows, position] = version
        self.stopped[rows] = np.isin(tokens[running], stops)
        self.lengths[rows] = position + 1  # last: another thread reads the tokens up to this length
        return self._running()

    def _running(self) -> np.ndarray:
        return (~self.stopped & (self.lengths < self.limits))[self.row_of_slot]

    def keep(self, running: np.ndarray) -> None:
        self.row_of_slot = self.row_of_slot[running]

    def samples(self, *, ended: bool = False) -> list[Sample]:
        """Returns the sample so far of each request, without text. Its finish is "abort" until it has ended. Routes are
        there once the batch has `ended`."""
        samples, arrays = [], (self.tokens, self.logprobs, self.versions)
        routes: Sequence[Routes | None] = [None] * len(self.requests)
        if ended and self.routes is not None and self.lengths.all():
            routes = self.routes.of_rows(self.lengths, self.requests)
        for row, (at, length) in enumerate(zip(self.requests, self.lengths.tolist(), strict=True)):
            finish: FinishReason = "stop" if self.stopped[row] else "length" if length == self.limits[row] else "abort"
            tokens, logprobs, versions = (array[row, :length].copy() for array in arrays)
            kept = None if self.sets is None else KeptSets.of(self.sets[row][:length])
            of = Sample(at.prompt_id, at.index, tokens, logprobs, versions, finish, "", routes=routes[row], kept=kept)
            samples.append(after_begun(at, of))
        return samples


# --- one token for each row -------------------------------------------------------------------------------------------


def broken(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Finds rows of `logits` [rows, vocab] with a NaN or, divided by the temperature, one too large: bool [rows]."""
    return ~(logits.amax(-1).float() / (temperature or 1.0)).isfinite()


def draw(
    logits: torch.Tensor, uniforms: torch.Tensor, sampling: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Draws tokens (int64 [rows]) and their logprobs (float32 [rows]) from `logits` [rows, vocab], `uniforms` [rows].

    Inverts the cumulative distribution at each row's uniform number. With `sampling.kept_sets` it returns the kept set
    of each row as well, bool [rows, vocab], and logprobs are over it. Otherwise they are under the whole
    temperature-scaled distribution even when top-k, top-p or min-p narrowed the draw, and at temperature 1 when greedy.
    """
    logits, kept = logits.float(), None
    if sampling.temperature == 0:
        logprobs = logits.log_softmax(-1)
        tokens = logits.argmax(-1)
    else:
        logprobs = (logits / sampling.temperature).log_softmax(-1)
        probabilities = truncate(logprobs.exp(), sampling.top_k, sampling.top_p, sampling.min_p)
        # The first token whose cumulated weight exceeds the uniform share of the total; never one of weight 0.
        cumulated = probabilities.cumsum(-1, dtype=torch.float64)
        tokens = torch.searchsorted(cumulated, uniforms[:, None] * cumulated[:, -1:], right=True)[:, 0]
        if sampling.kept_sets:
            kept = probabilities > 0
            logprobs = logprobs - logprobs.masked_fill(~kept, -torch.inf).logsumexp(-1, keepdim=True)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0], kept


def truncate(probabilities: torch.Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> torch.Tensor:
    """Returns `probabilities` [rows, vocab] with 0 outside the k likeliest tokens (0: all), then outside their nucleus,
    then for tokens that are less likely than `min_p` times the likeliest (arXiv:2407.01082).

    The nucleus is the smallest set of likeliest tokens whose share of the remaining mass reaches `top_p`
    (Holtzman et al., arXiv:1904.09751). Not renormalised, and in the order of the vocabulary: two tokens that swap
    ranks by a rounding error then do not swap places under the uniform number.
    """
    vocab = probabilities.shape[-1]
    likely = probabilities >= min_p * probabilities.amax(-1, keepdim=True)
    if not 0 < top_k < vocab and top_p >= 1:
        return probabilities * likely
    ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
    if 0 < top_k < vocab:
        ranked = ranked[:, :top_k]
        order = order[:, :top_k]
    if top_p < 1:
        total = ranked.cumsum(-1, dtype=torch.float64)
        mass_before = total - ranked
        ranked = ranked.masked_fill(mass_before >= top_p * total[:, -1:], 0.0)
    return torch.zeros_like(probabilities).scatter(-1, order, ranked) * likely


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns one uniform number in [0, 1) for each (seed, position): the same in any batch, order, engine or restart.

    `seeds` and `positions` are int64 of one shape, as is the float64 result. It is SplitMix64, started at the mixed
    seed and jumped to the position. 52 of its bits are kept: `u * total < total` then holds in float64 for any total,
    so that some token is always drawn.
    """
    state = mixed(seeds) + (positions + 1) * GAMMA
    return shifted(mixed(state), 12).to(torch.float64) * 2.0**-52


# --- keys and values --------------------------------------------------------------------------------------------------


def _empty_cache(model: Any, limit: int) -> Cache:
    """Makes a cache of the layer types in a model's config, for at most `limit` tokens of a row."""
    classes = DYNAMIC_LAYER_TYPE_MAPPING | {"full_attention": GrowingLayer, "sliding_attention": GrowingLayer}
    kinds, options = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
    return Cache(layers=[classes[kind](limit=limit, **more) for kind, more in zip(kinds, options, strict=True)])


class GrowingLayer(DynamicLayer):
    """One layer's keys and values, [rows, key-value heads, tokens, head size], in storage that grows in steps: its base
    copies everything at every token. No row will ever have more than `limit` tokens. Tokens that left the window of
    `sliding_window` tokens, of which the newest is one, are dropped."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, limit: int, sliding_window: int | None = None) -> None:
        super().__init__()
        self.is_sliding = sliding_window is not None
        self._limit = limit
        self._seen_again = limit if sliding_window is None else sliding_window - 1
        self._tokens = 0
        """All tokens so far, dropped ones too."""
        self._stored: list[torch.Tensor] = []
        """Storage of keys and values, for more tokens than there are. Empty: they have none."""
        self._end = 0
        """Column of the storage at which the next token goes."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends [rows, heads, tokens, head size] and returns all that the new tokens see."""
        used, new = self._used, key_states.shape[2]
        if not self.is_initialized:
            self._tokens = new
            return super().update(key_states, value_states)
        if not self._stored or self._end + new > self._stored[0].shape[2]:
            room = min(used + new + max(GROWTH_TOKENS, (used + new) // 2), self._limit) - used
            self._stored = [pad(old, (0, 0, 0, room)) for old in self._recent()]
            self._end = used
        first, self._end, self._tokens = self._end - used, self._end + new, self._tokens + new
        for stored, states in zip(self._stored, (key_states, value_states), strict=True):
            stored[:, :, self._end - new : self._end] = states
        self.keys, self.values = (stored[:, :, first : self._end] for stored in self._stored)
        return self.keys, self.values

    @property
    def _used(self) -> int:
        return min(self._tokens, self._seen_again)

    def _recent(self) -> list[torch.Tensor]:
        """Returns the keys and values that the next token sees."""
        return [states[:, :, states.shape[2] - self._used :] for states in (self.keys, self.values)]

    def get_seq_length(self) -> int:
        return self._tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns how many tokens `update` will return for so many new ones, and how many it will have dropped."""
        return self._used + query_length, self._tokens - self._used

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Makes row i what row beam_idx[i] was: expands a prompt to its samples, or drops rows that ended."""
        self.keys, self.values = (states[beam_idx] for states in self._recent())
        self._stored = []
