"""Arguments of the functions that ask models, checked like the sections of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import ValidationError

from megagrpo.section import Section

SHOWN_MAX = 5


class Arguments(Section):
    """The arguments that a recipe gives to a function that asks a model."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Checks the given arguments and returns them. Raises ValueError with the problems in one line."""
        try:
            made = cls.model_validate(dict(given))
        except ValidationError as error:
            shown = [_text(found["loc"], found["msg"]) for found in error.errors()[:SHOWN_MAX]]
            raise ValueError("; ".join(shown)) from None
        made.check()
        return made

    def check(self) -> None:
        """Raises ValueError if the fields do not fit together."""


def _text(place: tuple[int | str, ...], message: str) -> str:
    return f"{'.'.join(map(str, place))}: {message}" if place else message
