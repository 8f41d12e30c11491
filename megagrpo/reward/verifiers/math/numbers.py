"""Equality of expressions by their values at random points: fast where expanding them would take for ever."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

DIGITS = 40
SAME, OTHER = 10**30, 10**10
"""Values that differ by less than one part in SAME are equal, by more than one in OTHER are different."""
VANISHING = 10**60
"""A value below 1 / VANISHING may be 0, which has no digits to compare."""
POINTS = 3
UNREADABLE = (ArithmeticError, AttributeError, LookupError, NotImplementedError, RecursionError, TypeError, ValueError)
"""Exceptions of sympy for expressions that it cannot work out."""


def same_values(one: Any, other: Any) -> bool | None:
    """Returns whether two expressions have equal values at random points, negative ones included; None if undecided.

    Undecided if numbers are rounded, both are plain numbers, symbols differ, or a value is infinite or unknown.

    >>> import sympy; one = sympy.sympify("(x + y)**30")
    >>> [same_values(one, sympy.sympify(text)) for text in ("(x + y)**29*(x + y)", "(x + y)**29", "(x + z)**30")]
    [True, False, None]
    """
    import sympy
    from sympy.core.function import AppliedUndef

    rounded = (sympy.Float, sympy.core.expr.UnevaluatedExpr, AppliedUndef, sympy.Integral, sympy.Derivative)
    for expression in (one, other):
        if not isinstance(expression, sympy.Expr) or isinstance(expression, sympy.Symbol) or expression.has(*rounded):
            return None
        if expression.has(sympy.Sum, sympy.Product, sympy.Limit, sympy.MatrixExpr, sympy.MatrixBase):
            return None
    if one.free_symbols != other.free_symbols or (one.is_Number and other.is_Number):
        return None
    decided: bool | None = True
    for point in range(POINTS if one.free_symbols else 1):
        values = [_value(expression, point) for expression in (one, other)]
        if None in values:
            return None
        size, difference = max(map(abs, values)), abs(values[0] - values[1])
        if size * VANISHING < 1:
            return None
        if difference * OTHER > size:
            return False
        decided = decided if difference * SAME < size else None
    return decided


def _value(expression: Any, point: int) -> Any:
    """Returns the value of an expression with DIGITS digits, None if there is none."""
    import sympy

    symbols = sorted(expression.free_symbols, key=str)
    values = dict(zip(symbols, _numbers(point, len(symbols)), strict=True))
    try:
        value = expression.evalf(DIGITS, subs=values) if values else expression.evalf(DIGITS)
        parts = value.as_real_imag()
    except UNREADABLE:
        return None
    return value if all(isinstance(part, sympy.Float | sympy.Integer) and part.is_finite for part in parts) else None


@cache
def _numbers(point: int, count: int) -> tuple[Any, ...]:
    """Returns numbers from 1/2 to 5/2: positive at the first point, negative at the second, both signs at the third."""
    import sympy

    drawn = random.Random(point)
    signs = ((1,), (-1,), (1, -1))[point]
    return tuple(
        sympy.Rational(drawn.randrange(10**9, 5 * 10**9), 2 * 10**9) * signs[place % len(signs)]
        for place in range(count)
    )
