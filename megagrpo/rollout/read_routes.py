"""The experts that a model of transformers chooses for the tokens of one batch (decoding.py), row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from megagrpo.errors import EngineError, Problem
from megagrpo.routes import Routes, RouteSizes
from megagrpo.types import Request


class ReadRoutes:
    """The routes of all tokens that a batch has read: those of its prompts, then one of each row for each step."""

    def __init__(self, sizes: RouteSizes) -> None:
        self._sizes = sizes
        self._kind = np.uint8 if sizes.experts <= 2**8 else np.uint16
        self._chosen: list[torch.Tensor] = []
        """By layer, what the model's newest call has chosen: [tokens, experts per token]."""
        self._prompts: list[np.ndarray] = []
        self._steps: list[tuple[np.ndarray, np.ndarray]] = []
        """Rows in ascending order, and their [rows, layers, experts per token], of each step."""

    def add_prompts(self, lengths: Sequence[int], prompt_of: Sequence[int]) -> None:
        """Takes the routes of prompts that were padded on the left. prompt_of: the prompt of each row."""
        chosen = self._taken(len(lengths))
        prompts = [of[len(of) - length :] for of, length in zip(chosen, lengths, strict=True)]
        self._prompts = [prompts[index] for index in prompt_of]

    def add_step(self, rows: np.ndarray) -> None:
        """Takes the routes of a step that has read one token of each of these rows."""
        self._steps.append((rows, self._taken(len(rows))[:, 0]))

    def of_rows(self, lengths: np.ndarray, requests: Sequence[Request]) -> list[Routes]:
        """Returns the routes of all rows, whose responses have these lengths, at least 1 each. Raises EngineError,
        naming a request, if a model cannot have chosen them."""
        of_prompts = np.array([len(prompt) for prompt in self._prompts])
        ends = np.cumsum(of_prompts + lengths - 1)  # the last token is not read
        responses = ends - (lengths - 1)
        experts = np.full((ends[-1], *self._prompts[0].shape[1:]), np.iinfo(self._kind).max, self._kind)
        for prompt, end in zip(self._prompts, responses.tolist(), strict=True):
            experts[end - len(prompt) : end] = prompt
        for step, (rows, chosen) in enumerate(self._steps):
            recorded = step + 1 < lengths[rows]
            experts[responses[rows[recorded]] + step] = chosen[recorded]
        if not self._sizes.fit(experts):
            for at, start, end in zip(requests, responses - of_prompts, ends, strict=True):
                where = f"sample {at.index} of prompt {at.prompt_id}"
                self._sizes.require(experts[start:end], where, end - start)
        return Routes.of_each(experts, of_prompts + lengths - 1)

    @contextmanager
    def reading(self, model: Any) -> Iterator[None]:
        """Notes what the model's layers hand to their experts. In transformers these take the tokens, the indices of
        each one's experts, and weights, and end in this name. Raises EngineError for another number of layers."""
        layers = [module for name, module in model.named_modules() if name.endswith(".experts")]
        if len(layers) != self._sizes.layers:
            given, needed = f"{len(layers)} layers with experts", f"{self._sizes.layers} as config.json says"
            raise EngineError(Problem(f"routes of {type(model).__name__}", given, needed))
        hooks = [layer.register_forward_pre_hook(lambda _, args: self._chosen.append(args[1])) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _taken(self, rows: int) -> np.ndarray:
        """Returns the routes of the newest call, [rows, tokens of a row, layers, experts per token]."""
        experts = torch.stack(self._chosen, 1).cpu().numpy().astype(self._kind)
        self._chosen.clear()
        return experts.reshape(rows, -1, *experts.shape[1:])
