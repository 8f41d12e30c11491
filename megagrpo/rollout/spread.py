"""Which engine generates which request."""

from __future__ import annotations

from collections.abc import Sequence

from megagrpo.types import Request


def assign(requests: Sequence[Request], engines: int) -> list[list[int]]:
    """Indices of the requests for each engine, in their order.

    All requests with one prompt go to one engine, which reads the prompt once for all of them. Prompts go to the
    engine with the fewest requests so far, those with most samples first: no engine gets more than the smallest share
    plus the samples of one prompt.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        by_prompt.setdefault(request.tokens, []).append(index)
    of_engine: list[list[int]] = [[] for _ in range(engines)]
    for indices in sorted(by_prompt.values(), key=len, reverse=True):
        min(of_engine, key=len).extend(indices)
    return [sorted(indices) for indices in of_engine]
