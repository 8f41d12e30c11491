"""Rows of a framework's table, one for each option in the order of its page, and the answer about an option's value.

A row that needs more than a value, a choice or a switch has the name of a function that computes the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal

from megagrpo.importing.options import OFF, TYPES, NotKnownError, Options, among, picked, texts, truth, whole
from megagrpo.recipe.yaml12 import parse

ABSENT = object()
"""In place of a default: the option does nothing unless it is given."""
Kind = Literal["translated", "same", "missing", "unknown"]
"""same: nothing to write, because it is so here by default, or has no effect. missing: no counterpart. unknown: no row
names the option, or its value is not known."""


@dataclass(frozen=True)
class Write:
    """Fields of the recipe, by dotted paths; `*` in one stands for what the row's `*` does. note: how they differ from
    what the option means there. source: their origin, if not this option alone."""

    fields: Mapping[str, Any]
    note: str = ""
    source: str = ""


@dataclass(frozen=True)
class Unwritten:
    """The answer for an option that writes nothing, and why."""

    kind: Kind
    why: str


Nothing, Missing, Unknown = partial(Unwritten, "same"), partial(Unwritten, "missing"), partial(Unwritten, "unknown")


@dataclass(frozen=True)
class Together:
    """The answer for an option that other options read: the fields that they write include it."""


Answer = Write | Unwritten | Together


# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Condition:
    """A condition without which options have no effect. Its names are of options, or of functions of all options."""

    otherwise: str  # the reason why they have none
    only: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # values by name: each has one of its own
    unless: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # values by name: none has one of these
    functions: Mapping[str, Callable[[Options], Any]] = field(default_factory=dict)

    def holds(self, options: Options) -> bool:
        return all(self._has(options, *one) for one in self.only.items()) and not any(
            self._has(options, *one) for one in self.unless.items()
        )

    def _has(self, options: Options, name: str, values: Sequence[Any]) -> bool:
        value = self.functions[name](options) if name in self.functions else options[name]
        return among(truth(value) if isinstance(values[0], bool) else value, values)


@dataclass(frozen=True)
class Row:
    """One option. tests/unit/test_importing.py has the forms of rows: keys that are given together."""

    default: Any = ABSENT  # the framework's default, for an option that is not given
    page_note: str = ""  # the difference, for pages
    to: str = ""  # the recipe's field that is written, by its dotted path; `*` in it stands for what the row's `*` does
    shown: str = ""  # the field that pages name, if it is not `to`
    type: str = ""  # the kind of the option's values, of TYPES
    instead: str = ""  # the option whose value counts in the place of null
    note: str = ""  # the difference, for a reader of the recipe
    choices: Mapping[str, Any] = field(default_factory=dict)
    """The field's value by the option's, or a mapping of several fields."""
    otherwise: str = ""  # the reason why other values have no counterpart
    if_true: Any = ABSENT
    if_false: Any = ABSENT
    """The field's value while the option is on or off. One may be left out, with `same` in its place."""
    same: str = ""
    """The reason why the option writes nothing: megagrpo does the same, or the option has no effect. Beside an answer:
    while it is off, or has a value of `nothing`."""
    missing: str = ""  # the reason why the option has no counterpart, and what to do. Values of OFF need none
    nothing: Sequence[Any] = ()  # more values that write nothing
    least: float | None = None
    """The least value that is written: for a lesser one, or none, `same` or `missing` has the reason."""
    part_of: str = ""  # the field that other options write, which read this one
    answer: Callable[[Any, Options], Answer] | None = None
    """The function that computes the answer from the option's value and all options."""
    when: Condition | None = None

    @property
    def fields(self) -> str:
        """Returns the recipe's fields, as pages name them."""
        return self.shown or self.to or self.part_of

    def of(self, value: Any, options: Options) -> Answer:
        try:
            if self.when and not self.when.holds(options):
                return Nothing(self.when.otherwise)
        except NotKnownError:  # an option that is off writes nothing in any case
            values = self.nothing or ((None, False) if self.if_false is ABSENT else ())
            if not self.same or not among(value, values):
                raise
            return Nothing(self.same)
        if self.instead and value is None:
            value = options[self.instead]
        if self.answer:
            off = among(value, self.nothing) if self.nothing else self.same and not truth(value)
            return Nothing(self.same) if off else self.answer(value, options)
        if self.part_of:
            is_known = not self.otherwise or among(value, self.nothing)
            return Together() if is_known else Missing(self.otherwise)
        nothing = among(value, self.nothing)
        if self.otherwise:
            choice = picked(self.choices, TYPES[self.type](value) if self.type else value)
            if choice is not None:
                return Write(choice if isinstance(choice, dict) else {self.to: choice})
            return (Nothing(self.same) if self.same else Write({})) if nothing else Missing(self.otherwise)
        if self.least is not None and (value is None or whole(value) < self.least):
            return Nothing(self.same) if self.same else Missing(self.missing)
        if self.type:
            return Nothing(self.same or "not set") if nothing else Write({self.to: TYPES[self.type](value)}, self.note)
        if self.missing:
            off = nothing or among(value, OFF) or value in ([], {})
            return Nothing("as here") if off else Missing(self.missing)
        if self.if_true is ABSENT and self.if_false is ABSENT:
            return Nothing(self.same)
        switched = self.if_true if truth(value) else self.if_false
        return Nothing(self.same) if switched is ABSENT else Write({self.to: switched})


Table = Mapping[str, Row]
"""Rows by options; `prefix.*` is the row of all options that begin so and have no row of their own."""


def read_table(path: Path, functions: Mapping[str, Any]) -> Table:
    """Reads a file of rows, and of `conditions` by name. functions: those that both name."""
    rows = parse(path.read_text(encoding="utf-8"), str).tree
    named = rows.pop("conditions", {}).items()
    conditions = {name: Condition(**condition, functions=functions) for name, condition in named}
    for row in rows.values():
        for key, known in (("answer", functions), ("when", conditions)):
            if key in row:
                row[key] = known[row[key]]
    return {option: Row(**row) for option, row in rows.items()}


# --- answers that several frameworks share ----------------------------------------------------------------------------


def ranks_of(gpus: int, sizes: Mapping[str, int], engine: int, engines: int | None = None) -> Answer:
    """Returns data ranks and engines on `gpus` GPUs that both use in turn. sizes: of tensor, pipeline and context;
    engine: GPUs of one engine. engines: their number, if they have GPUs of their own."""
    ranks = prod(sizes.values())
    if gpus % ranks:
        product = " x ".join(f"{name} {size}" for name, size in sizes.items())
        return Missing(f"{gpus} GPUs are no multiple of {product}: give train.layout")
    if engines is None and gpus % engine:
        return Missing(f"{gpus} GPUs are no multiple of engines of {engine}: give rollout.engines")
    return Write({"train.layout.data": gpus // ranks, "rollout.engines": engines or gpus // engine})


def recomputed(granularity: Any, options: Options, prefix: str = "") -> Answer:
    """Returns Megatron's recomputation. prefix: of its options' names."""
    if granularity == "selective":
        modules = options[f"{prefix}recompute_modules"]
        plain = not modules or modules == ["core_attn"]
        return Write({"train.recompute": "selective" if plain else {"modules": texts(modules)}})
    layers, method = options[f"{prefix}recompute_num_layers"], options[f"{prefix}recompute_method"]
    return Write({"train.recompute": {"layers": whole(layers)} if method == "block" and layers else "full"})


def microbatches(longest: int) -> tuple[int, str]:
    """Returns the tokens of a microbatch that holds the longest sequence, and why."""
    return max(longest, 8192), "as many as the longest sequence, at least"


def warmup(share: float, steps: Any) -> Answer:
    """Returns the steps of a warm-up that is a share of all. steps: None if unknown before the data is counted."""
    if not share:
        return Write({"train.optimizer.warmup_steps": 0})
    if steps is None:
        return Missing(f"a share of all steps ({share:g}): give their number in train.optimizer.warmup_steps")
    return Write({"train.optimizer.warmup_steps": round(share * whole(steps))})
