"""Arguments of the functions that ask models: sections of their own, checked as those of a recipe are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import ValidationError

from megagrpo.section import Section

SHOWN_MAX = 5


class Arguments(Section):
    """What a recipe gives such a function."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Raises ValueError, which says in a line what is wrong with them."""
        try:
            made = cls.model_validate(dict(given))
        except ValidationError as error:
            shown = [_text(found["loc"], found["msg"]) for found in error.errors()[:SHOWN_MAX]]
            raise ValueError("; ".join(shown)) from None
        made.check()
        return made

    def check(self) -> None:
        """Raises ValueError for what its fields do not say alone."""


def _text(place: tuple[int | str, ...], message: str) -> str:
    return f"{'.'.join(map(str, place))}: {message}" if place else message
