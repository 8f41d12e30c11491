"""A tool of one's own: what the policy is told of it are the name, the type hints and the docstring."""

from __future__ import annotations

import operator
import re

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
CALCULATION = re.compile(r"(-?\d{1,12})([+*-])(\d{1,12})")


def calculate(expression: str) -> int:
    """Calculates with two whole numbers.

    Args:
        expression: A sum, difference or product, such as 12*34.
    """
    found = CALCULATION.fullmatch(expression)
    if found is None:
        raise ValueError("not two numbers with +, - or * between them")  # the policy reads this
    return OPERATORS[found[2]](int(found[1]), int(found[3]))
