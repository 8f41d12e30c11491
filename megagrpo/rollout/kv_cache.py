"""Keys and values of a batch of rows, in storage that grows in steps: one row per prompt, then one per sample."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH_TOKENS = 32  # smallest step; larger ones are half of what is in use


class GrowingLayer(CacheLayerMixin):
    """One layer's keys and values, [rows, key-value heads, capacity, head size]; the first `length` tokens are in use.

    transformers' own dynamic layer copies everything at every token; its static one attends to its whole capacity.
    """

    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        # A prompt is kept as it came: it is expanded to its samples, in storage of their own, before it grows.
        self.keys, self.values = key_states, value_states
        self.length = key_states.shape[2]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends [rows, heads, tokens, head size] and returns all in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            return key_states, value_states
        end = self.length + key_states.shape[2]
        if end > self.keys.shape[2]:
            self._move(None, capacity=min(end + max(GROWTH_TOKENS, end // 2), self.limit))
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def select_rows(self, rows: torch.Tensor) -> None:
        """Makes row i what rows[i] was: expands a prompt to its samples, or drops rows that ended."""
        self._move(rows, capacity=min(max(self.keys.shape[2], self.length + GROWTH_TOKENS), self.limit))

    def _move(self, rows: torch.Tensor | None, capacity: int) -> None:
        self.keys = self._moved(self.keys, rows, capacity)
        self.values = self._moved(self.values, rows, capacity)

    def _moved(self, old: torch.Tensor, rows: torch.Tensor | None, capacity: int) -> torch.Tensor:
        used = old[:, :, : self.length]
        new = old.new_empty((len(old) if rows is None else len(rows), old.shape[1], capacity, old.shape[3]))
        if rows is None:
            new[:, :, : self.length] = used
        else:
            torch.index_select(used, 0, rows, out=new[:, :, : self.length])
        return new

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1  # transformers' word for no limit


class GrowingCache(Cache):
    """One GrowingLayer for each layer of a model. No row will ever hold more than `limit` tokens."""

    def __init__(self, layers: int, limit: int) -> None:
        self.growing = [GrowingLayer(limit) for _ in range(layers)]
        super().__init__(layers=list(self.growing))

    @property
    def length(self) -> int:
        """Columns in use, the same in every layer."""
        return self.growing[0].length

    def select_rows(self, rows: torch.Tensor) -> None:
        for layer in self.growing:
            layer.select_rows(rows)
