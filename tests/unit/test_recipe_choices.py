"""Every field of the schema is varied by recipes that differ in one choice."""

from __future__ import annotations

from tests.recipe_choices import NOT_HERE, STARTS, VALUES, WITH, Choices, base


def test_each_field_of_the_schema_is_varied_or_has_a_reason() -> None:
    choices = Choices()
    found = choices.of(base())
    assert choices.unknown == set(), "tests/recipe_choices.py needs a value of these, or a reason"
    fields = {f"{title}.{name}" for title, node in choices.sections_by_title() for name in node["properties"]}
    assert {*VALUES, *(key.partition("=")[0] for key in NOT_HERE if "." in key)} <= fields
    assert all(any(name.startswith(begin) for name in found) for begin in WITH)
    assert STARTS.keys() <= {title for title, _ in choices.sections_by_title()}
