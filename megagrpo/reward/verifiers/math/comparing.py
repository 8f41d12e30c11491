r"""Comparison of an answer with a ground truth.

Texts are first put into math-verify's notation (notation.py). Answers that it would misread are compared in kinds.py,
expressions by their values.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import sympy
from math_verify import parse, verify
from sympy.core.expr import UnevaluatedExpr
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from megagrpo.reward.answer_text import final_answer, last_boxed, plain, tagged
from megagrpo.reward.verifiers.math.kinds import same_kind
from megagrpo.reward.verifiers.math.notation import in_ascii, joined_boxes, readable, readings
from megagrpo.reward.verifiers.strict_math import normalised

TAIL_CHARACTERS = 2000
"""Characters to search if a response marks no answer: math-verify's patterns take long on texts."""

ANSWER_CHARACTERS_MAX = 1000
"""A longer answer than this, and than twice the ground truth, is wrong: parsing thousands of brackets takes minutes."""

TERMS_MAX = 2000
"""An answer that has more terms than this when it is expanded, and than the ground truth, is wrong as well."""

NODES_MAX, EXPONENT_MAX, BITS_MAX, TEXT_TERMS_MAX = 60, 100, 400, 300
"""Beyond these, an expression's text is not computed."""

UNREADABLE = (
    *(ArithmeticError, AttributeError, LookupError, NotImplementedError, RecursionError, TypeError, ValueError),
    sympy.PolynomialError,  # for a set within a sum
)
"""Exceptions of sympy for expressions that it cannot work out."""

DIGITS = 40
SAME, OTHER = 10**30, 10**10
"""Values that differ by less than one part in SAME are equal, by more than one in OTHER are different."""
VANISHING = 10**60
"""A value below 1 / VANISHING may be 0, which has no digits to compare."""
POINTS = 3

_SIGNS = re.compile(
    r"\\(?:neq?|neg|lnot|not|to|mapsto|implies|iff|vee|lor|wedge|land|sim|equiv|cong|oplus|\\"
    r"|(?:[Ll]ong)?(?:[Ll]eft)?(?:[Rr]ight)?arrow)(?![A-Za-z])|[≠→⇒∨∧≡&]|[-=]>|!=|\w\s*\\cup(?![a-z])"
)
_WORDS = re.compile(r"(?i)\b(?:not|wrong|incorrect|false|never)\b|\(\s*(?:\\text\s*\{\s*)?or\b")
_ENVIRONMENT = re.compile(r"\\begin\b.*\\end\s*\{\w+\*?\}", re.DOTALL)
_COMMA = re.compile(r"[,;]|\\(?:text|mbox|mathrm|quad|qquad)(?![A-Za-z])|\b(?:and|or)\b")
_EQUALS = re.compile(r"(?<![<>!:])=(?!>)")
_STYLE = re.compile(
    r"\\(?:text\w*|math\w*|mbox|overline|overrightarrow|vec|hat|bar|angle|triangle|operatorname)\b"
    r"|\\d?frac\s*\{d\w*\}\s*\{d\w\}"
)
_SUBSCRIPT = re.compile(r"_\s*(?:\{[^{}]*\}|\\?\w)|\^\s*\{\s*-\s*1\s*\}|\\left\b|\\right\b")
_ARGUMENTS = re.compile(r"(?<=[\w'}])\s*\([^()+*/^=]*\)")
_OPERATION = re.compile(r"[\d+\-*/^<>!]|\\(?:d|t|c)?frac|\\(?:sqrt|cdot|times|div|int|sum|prod|lim|binom|log|ln)\b")
_NOT = r"(?:(?i:\b(?:not|never|cannot|wrong|incorrect)\b)|n['’]t\b|\\neq?\b|≠)"
_DENIAL = re.compile(_NOT)
# Up to two words before the last number of a line, or behind it: "it is not 4", "4 is wrong"
_DENIED_NUMBER = re.compile(
    rf"{_NOT}(?:[^\w:;,.]+[A-Za-z]+){{0,2}}[^\w:;,.]*\d[\d.,]*\D*$"
    r"|\d\W*(?:is|was)(?:n['’]t| not| wrong| incorrect)\b\D*$"
)
_ANSWER_IS = re.compile(r"(?i)\banswer(?:\s+is)?\b\s*:?[*\s]*")
_OR = re.compile(r"\s*(?:\\text\s*\{\s*or\s*\}|\bor\b|\\lor(?![a-z]))\s*")
_STATEMENT = re.compile(r"[\d,;]|\.\s")


@dataclass(frozen=True)
class Truth:
    """A ground truth that has been read."""

    given: str
    latex: str
    parsed: list[Any]
    """Its parses by math-verify."""
    text: str
    of_kind: bool
    """True if `same_kind` compares it."""


def read_truth(ground_truth: str) -> Truth:
    """Reads a ground truth. Raises ValueError if it is neither an expression nor of a kind of its own."""
    boxed = last_boxed(ground_truth)
    latex = readable(ground_truth if boxed is None else boxed)
    latex = latex[1:-1].strip() if latex.count("$") == 2 and latex[0] == latex[-1] == "$" else latex
    of_kind = same_kind(latex, latex) is True
    parses = parse(latex, parsing_timeout=None) if "$" in latex else parsed(latex)
    if not parses and not of_kind:
        raise ValueError(f"the ground truth {ground_truth[:200]!r} is not an expression")
    return Truth(in_ascii(ground_truth), latex, parses, normalised(latex) if of_kind else answer_text(parses), of_kind)


def compared(truth: Truth, text: str) -> dict[str, Any]:
    """Returns the score of a response without its reasoning, and its answer."""
    given = final_answer(text)
    given = tagged(text, "answer") if given is None else given
    if given is None and "\\boxed{" in text:
        return {"score": 0.0}  # the last one is not closed: where the answer ends is not known
    if given is None and truth.of_kind and same_kind(truth.latex, readable(stated(text))) is not None:
        given = stated(text)
    result = scored(truth, text, given)
    several = "," in _outermost(truth.latex.strip("\\{} "))
    if not result["score"] and several and (boxes := joined_boxes(text)):
        of_all = scored(truth, text, boxes)
        return of_all if of_all["score"] else result
    return result


def scored(truth: Truth, text: str, given: str | None) -> dict[str, Any]:
    """Returns the score of an answer, or of a text that marks none."""
    if given is None:
        tail = unmarked(text)
        answer = [] if is_denied(tail) else parse(plain(tail).replace("\\$", ""), parsing_timeout=None)
    else:
        if len(given) > max(ANSWER_CHARACTERS_MAX, 2 * len(truth.given)):
            return {"score": 0.0}
        latex = readable(given)
        if (same := same_kind(truth.latex, latex)) is not None:
            return {"score": 1.0, "answer": truth.text} if same else {"score": 0.0, "answer": given}
        # math-verify reads several boxes as a set, so the last one alone is handed to it
        answer = [] if leaves_out(in_ascii(given), truth.given) else parsed(latex)
    if not answer:
        return {"score": 0.0}
    sides = expressions(in_ascii(given or "")) if "=" not in _outermost(truth.given) else []
    if equal(truth.parsed, answer) and all(equal(truth.parsed, parsed(side)) for side in sides):
        return {"score": 1.0, "answer": truth.text}
    text = answer_text(answer)
    return {"score": 0.0, "answer": text if text != truth.text else given or text} if text else {"score": 0.0}


def parsed(latex: str) -> list[Any]:
    """Returns math-verify's parses of LaTeX: an expression for each reading, and texts. Empty if there is none."""
    parses: list[Any] = []
    for reading in readings(latex):
        parts = [parse(f"\\boxed{{{part}}}", parsing_timeout=None) for part in _OR.split(reading)]
        union = _union([part[0] for part in parts if part]) if len(parts) > 1 else None
        parses += parse(f"\\boxed{{{reading}}}", parsing_timeout=None) if union is None else [union, reading]
    return parses


def _union(relations: list[Any]) -> Any:
    """Returns the numbers that satisfy one of several inequalities, None if they are no inequalities."""
    try:
        sets = [part.as_set() if isinstance(part, Relational) else part for part in relations]
    except UNREADABLE:
        return None
    return sympy.Union(*sets) if all(isinstance(part, sympy.Set) and part.is_Interval for part in sets) else None


def equal(truth: list[Any], answer: list[Any]) -> bool:
    """Returns whether a truth and an answer are equal by their values or math-verify; False if not comparable.

    Raises ValueError if the truth cannot be compared with itself; MemoryError, as far as math-verify and sympy do.
    """
    pairs = itertools.product(*([one for one in side if not isinstance(one, str)] for side in (truth, answer)))
    by_values = [same_values(*pair) for pair in pairs]
    if True in by_values or (by_values and None not in by_values):
        return True in by_values
    if not answer or not truth or terms(answer[0]) > max(TERMS_MAX, terms(truth[0])):
        return False
    compare = partial(verify, allow_set_relation_comp=True, timeout_seconds=None)
    try:
        return bool(compare(truth, answer, raise_on_error=True))
    except UNREADABLE:
        pass
    try:
        compare(truth, truth, raise_on_error=True)
    except UNREADABLE as reason:
        raise ValueError(f"the ground truth cannot be compared: {type(reason).__name__}: {reason}") from None
    return bool(compare(truth, [text for text in answer if isinstance(text, str)]))


def leaves_out(latex: str, ground_truth: str) -> bool:
    r"""Returns whether an answer has, unlike the truth, what math-verify skips: not, wrong, \neq, \to, \vee, a new row.

    >>> [leaves_out(text, "4") for text in (r"\neq 4", "3 (or 4)", r"x \to 4", r"4 \text{ is wrong}", r"x = 4", "|4|")]
    [True, True, True, True, False, False]
    """
    of_truth, outermost = ground_truth.lower().replace("\\neq", "\\ne"), _outermost(latex)
    signs = [sign.lower().replace("\\neq", "\\ne") for sign in _SIGNS.findall(outermost) + _WORDS.findall(latex)]
    return any(sign not in of_truth for sign in signs) or outermost.count("|") % 2 > ground_truth.count("|") % 2


def expressions(latex: str) -> list[str]:
    r"""Returns the sides of a chain of equations but for a name on its left. math-verify would read only the last.

    >>> [expressions(text) for text in ("x^2 = 4", "f(x) = 1 = 4", "x = 4", "x = 1, y = 2", "4")]
    [['x^2', '4'], ['1', '4'], [], [], []]
    """
    outermost = _outermost(latex)
    all_sides: list[str] = []
    start = 0
    for end, after in [*(comma.span() for comma in _COMMA.finditer(outermost)), (len(latex), len(latex))]:
        signs = [start - 1, *(sign.start() for sign in _EQUALS.finditer(outermost, start, end)), end]
        sides = [latex[left + 1 : right].strip() for left, right in itertools.pairwise(signs)]
        if not sides[0] or is_name(sides[0]):
            sides = sides[1:]
        all_sides += sides if len(signs) > 3 or len(sides) > 1 else []
        start = after
    return all_sides


def is_name(latex: str) -> bool:
    r"""Returns whether LaTeX is a name, such as a letter, and not an expression.

    >>> [is_name(text) for text in ("x", "(x, y)", "f(x)", r"\angle ABC", "S_{10}", "P(A)", "x^2", "a + b", "2")]
    [True, True, True, True, True, True, False, False, False]
    """
    plain = _STYLE.sub("n", latex)
    plain = _ARGUMENTS.sub("", _SUBSCRIPT.sub("", plain))
    return any(map(str.isalpha, plain)) and not _OPERATION.search(plain)


def is_denied(text: str) -> bool:
    """Returns whether a text without a marked answer says that a number is not the answer.

    >>> [is_denied(text) for text in ("The answer is not 4", "The answer is 4, not 5.", "It isn't 4.", "So 4.")]
    [True, False, True, False]
    """
    word = text.lower().rfind("answer")
    if word >= 0:
        return _DENIAL.search(_STATEMENT.split(text[word:], maxsplit=1)[0]) is not None
    end = max(map(text.rfind, "0123456789"))
    return _DENIED_NUMBER.search(text[text.rfind("\n", 0, end + 1) + 1 :].partition("\n")[0]) is not None


def stated(text: str) -> str:
    """Returns the text after the last "answer is" up to the end of the line or sentence, else the last line.

    >>> stated("The answer is 10:30 AM. So it is late."), stated("So it is:\\n12:00"), stated("**Answer:** $x$")
    ('10:30 AM', '12:00', 'x')
    """
    tail = unmarked(text).strip()
    *_, statement = _ANSWER_IS.split(tail) if _ANSWER_IS.search(tail) else tail.splitlines() or [""]
    return re.split(r"\n|\.\s", statement.strip(), maxsplit=1)[0].strip("*$. ")


def _outermost(latex: str) -> str:
    """Returns the LaTeX with a point for each character in brackets and environments, so that indices stay the same."""
    latex = _ENVIRONMENT.sub(lambda rows: "." * len(rows.group()), latex)
    depth = 0
    masked = []
    for character in latex:
        depth -= character in ")]}" and depth > 0
        masked.append("." if depth else character)
        depth += character in "([{"
    return "".join(masked)


def unmarked(text: str) -> str:
    """Returns the text in which math-verify looks for an unmarked answer: the end, or from the last "answer" on."""
    start = max(len(text) - TAIL_CHARACTERS, 0)
    word = text.lower().rfind("answer")
    return text[word : word + TAIL_CHARACTERS] if 0 <= word < start else text[start:]


def answer_text(parsed: list[Any]) -> str:
    """Returns one text for equal answers that math-verify parsed (expression and LaTeX); empty if there is neither."""
    latex = next((normalised(item) for item in parsed if isinstance(item, str)), "")
    expression = parsed[0] if parsed else ""
    if isinstance(expression, str) or not _is_small(expression):
        return latex
    try:
        return _text(expression)
    except UNREADABLE:
        return latex


def _text(expression: Any) -> str:
    if isinstance(expression, sympy.MatrixBase):
        return str([[_text(item) for item in row] for row in expression.tolist()])
    if isinstance(expression, sympy.FiniteSet):
        return ", ".join(sorted({_text(item) for item in expression.args}))
    if isinstance(expression, sympy.Tuple):
        return f"({', '.join(map(_text, expression.args))})"
    if isinstance(expression, sympy.Union | sympy.Intersection):
        return f"{type(expression).__name__}({', '.join(sorted(map(_text, expression.args)))})"
    if isinstance(expression, sympy.Interval):
        low, high = _text(expression.start), _text(expression.end)
        return f"{'(' if expression.left_open else '['}{low}, {high}{')' if expression.right_open else ']'}"
    if isinstance(expression, sympy.Eq) and isinstance(expression.lhs, sympy.Symbol):
        return _text(expression.rhs)  # x = 5 is 5, for math-verify too
    if isinstance(expression, Relational):
        return str(expression.canonical)
    if isinstance(expression, sympy.And):
        return ", ".join(sorted(map(_text, expression.args)))
    value = expression.doit()
    if value.has(sympy.Float):
        value = sympy.nsimplify(value, rational=True)
    if value.is_Rational or not value.is_number:
        return str(sympy.cancel(value))
    return str(sympy.N(value, 12)) if value.is_finite else str(value)


def _is_small(expression: Any) -> bool:
    """Returns whether an expression is fast to compute: few parts, and no large power or factorial."""
    for count, part in enumerate(sympy.preorder_traversal(expression)):
        if count > NODES_MAX or (isinstance(part, sympy.Rational) and max(abs(part.p), part.q).bit_length() > BITS_MAX):
            return False
        large = part.args[-1] if isinstance(part, sympy.Pow | sympy.factorial) else sympy.Integer(1)
        if large.is_number and not (isinstance(large, sympy.Rational) and abs(large) <= EXPONENT_MAX):
            return False
        if isinstance(part, sympy.Sum | sympy.Product | sympy.Integral | sympy.Limit | sympy.Derivative):
            return False
    return terms(expression) <= TEXT_TERMS_MAX


def terms(expression: Any) -> float:
    """Returns an upper bound on the terms of an expression when it is expanded; 1 for a text.

    >>> import sympy; terms(sympy.sympify("(x + y + 1)**3 * (x + 2)"))
    20.0
    """
    if isinstance(expression, sympy.MatrixBase):
        return sum(map(terms, expression.flat()))
    if not isinstance(expression, sympy.Basic):
        return 1.0
    if isinstance(expression, sympy.Pow) and expression.exp.is_Integer:
        power, of_base = abs(int(expression.exp)), terms(expression.base)
        if of_base <= 1 or max(power, of_base) > TERMS_MAX:
            return 1.0 if of_base <= 1 else math.inf
        return float(math.comb(int(of_base) + power - 1, power))
    of_parts = [terms(part) for part in expression.args] or [1.0]
    return sum(of_parts) if isinstance(expression, sympy.Add) else math.prod(of_parts)


# --- values at random points: fast where expanding an expression would take for ever ----------------------------------


def same_values(one: Any, other: Any) -> bool | None:
    """Returns whether two expressions have equal values at random points, negative ones included; None if undecided.

    Undecided if numbers are rounded, both are plain numbers, symbols differ, or a value is infinite or unknown.

    >>> import sympy; one = sympy.sympify("(x + y)**30")
    >>> [same_values(one, sympy.sympify(text)) for text in ("(x + y)**29*(x + y)", "(x + y)**29", "(x + z)**30")]
    [True, False, None]
    """
    rounded = (sympy.Float, UnevaluatedExpr, AppliedUndef, sympy.Integral, sympy.Derivative)
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
    drawn = random.Random(point)
    signs = ((1,), (-1,), (1, -1))[point]
    return tuple(
        sympy.Rational(drawn.randrange(10**9, 5 * 10**9), 2 * 10**9) * signs[place % len(signs)]
        for place in range(count)
    )
