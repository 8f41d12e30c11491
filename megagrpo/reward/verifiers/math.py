r"""Mathematical expressions compared by math-verify (https://github.com/huggingface/Math-Verify).

math-verify's own time limits use SIGALRM, which only works on a main thread and outside long C calls. They are off
here; the worker process that runs this is killed at the time limit instead.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from megagrpo.boxed import last_boxed
from megagrpo.reward.answer_text import after_thinking, final_answer, tagged
from megagrpo.reward.functions import RewardCallable, RewardReturn
from megagrpo.reward.verifiers.strict_math import normalised

if TYPE_CHECKING:
    import sympy

TAIL_CHARACTERS = 2000
"""Where a response marks no answer, one is looked for in so much of it: math-verify's patterns take long on texts."""

ANSWER_CHARACTERS_MAX = 1000
"""A longer answer than this, and than twice the ground truth, is wrong: parsing thousands of brackets takes minutes."""

TERMS_MAX = 2000
"""An answer that has more terms than this when it is expanded, and than the ground truth, is wrong as well."""

NODES_MAX, EXPONENT_MAX, BITS_MAX, TEXT_TERMS_MAX = 60, 100, 400, 300
"""Beyond these, an expression's text is not worked out."""

UNREADABLE = (ArithmeticError, AttributeError, LookupError, NotImplementedError, RecursionError, TypeError, ValueError)
"""What sympy raises about expressions that it cannot work out."""

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
_STATEMENT = re.compile(r"[\d,;]|\.\s")

_SHORT_BINOMIAL = re.compile(r"\\binom\s*(\w)\s*(\w)")
_BOUND = r"([^<>=\\]+|\\?[^<>=\\]*\\infty[^<>=\\]*)"
_FALLING = re.compile(rf"\s*{_BOUND}(>|\\geq?(?![a-z]))([^<>=\\]+)(>|\\geq?(?![a-z])){_BOUND}\s*")


def make() -> RewardCallable:
    r"""1.0 if the response's answer equals the ground truth, else 0.0.

    The answer is the last `\boxed{}` of what follows the reasoning, or what "The final answer is" names behind it, else
    the last `<answer>…</answer>`, else what math-verify finds near the last "answer" or the end. Several answers stand
    in one, as `\boxed{1, 2}`. Each side of an equation must be right, but for a name on its left, as in `x = 2`; what
    math-verify passes over (`\neq`, `\to`, `\vee`, not, wrong) is wrong unless the truth has it. The ground truth is
    LaTeX or plain text, with or without `$` or `\boxed{}`; ValueError if it is none. `answer` of equal answers is one
    text where it is not too large to work out; of right ones it always is.
    Imports sympy: about a second.

    >>> verify = make(); verify(response=r"It is \boxed{\frac{2}{4}}.", ground_truth="0.5")
    {'score': 1.0, 'answer': '1/2'}
    >>> verify(response=r"\boxed{1}, no: \boxed{x^2 - 1}", ground_truth="(x + 1)^2")
    {'score': 0.0, 'answer': 'x**2 - 1'}
    """
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    from math_verify import parse

    @lru_cache(maxsize=4096)
    def parsed_truth(ground_truth: str) -> tuple[list[Any], str]:
        boxed = last_boxed(ground_truth)
        text = readable(ground_truth if boxed is None else f"\\boxed{{{boxed}}}")
        truth = parse(text if "$" in text or boxed is not None else f"${text}$", parsing_timeout=None)
        if not truth:
            raise ValueError(f"the ground truth {ground_truth[:200]!r} is not an expression")
        return truth, answer_text(truth)

    def verified(response: str, ground_truth: str, prompt_text: str = "") -> RewardReturn:
        truth, truth_text = parsed_truth(ground_truth)
        text = after_thinking(response, prompt_text)
        given = final_answer(text)
        given = tagged(text, "answer") if given is None else given
        if given is None and "\\boxed{" in text:
            return {"score": 0.0}  # the last one is not closed: where the answer ends is not known
        if given is not None and len(given) > max(ANSWER_CHARACTERS_MAX, 2 * len(ground_truth)):
            return {"score": 0.0}
        if leaves_out(given, ground_truth) if given is not None else is_denied(unmarked(text)):
            return {"score": 0.0}
        # math-verify reads several boxes as a set, so the last one alone is handed to it
        marked = unmarked(text) if given is None else f"\\boxed{{{readable(given)}}}"
        answer = parse(marked, parsing_timeout=None)
        if not answer or terms(answer[0]) > max(TERMS_MAX, terms(truth[0])):
            return {"score": 0.0}
        sides = expressions(given or "") if "=" not in _outermost(ground_truth) else []
        sides_right = (equal(truth, parse(f"\\boxed{{{side}}}", parsing_timeout=None)) for side in sides)
        if equal(truth, answer) and all(sides_right):
            return {"score": 1.0, "answer": truth_text}
        text = answer_text(answer)
        return {"score": 0.0, "answer": text if text != truth_text else given or text} if text else {"score": 0.0}

    verified("$1$", "1")  # the first parse builds the grammar, which would count for the first response
    return verified


def solution(ground_truth: str) -> str:
    """A right response: the ground truth in a box, unless it has one."""
    return ground_truth if "\\boxed" in ground_truth else f"\\boxed{{{ground_truth.strip().strip('$')}}}"


def equal(truth: list[Any], answer: list[Any]) -> bool:
    """Whether math-verify holds them to be equal. What it cannot compare is not.

    ValueError if the truth cannot be compared with itself. MemoryError, as far as math-verify and sympy let it out.
    """
    import sympy
    from math_verify import verify

    unreadable = (*UNREADABLE, sympy.PolynomialError)
    if not answer or terms(answer[0]) > max(TERMS_MAX, terms(truth[0])):
        return False
    try:
        return bool(verify(truth, answer, timeout_seconds=None, raise_on_error=True))
    except unreadable:
        pass
    try:
        verify(truth, truth, timeout_seconds=None, raise_on_error=True)
    except unreadable as reason:
        raise ValueError(f"the ground truth cannot be compared: {type(reason).__name__}: {reason}") from None
    return bool(verify(truth, [text for text in answer if isinstance(text, str)], timeout_seconds=None))


def leaves_out(latex: str, ground_truth: str) -> bool:
    r"""Whether an answer has what math-verify passes over, not in the truth: not, wrong, \neq, \to, \vee, a new row.

    >>> [leaves_out(text, "4") for text in (r"\neq 4", "3 (or 4)", r"x \to 4", r"4 \text{ is wrong}", r"x = 4", "|4|")]
    [True, True, True, True, False, False]
    """
    of_truth, outermost = ground_truth.lower().replace("\\neq", "\\ne"), _outermost(latex)
    signs = [sign.lower().replace("\\neq", "\\ne") for sign in _SIGNS.findall(outermost) + _WORDS.findall(latex)]
    return any(sign not in of_truth for sign in signs) or outermost.count("|") % 2 > ground_truth.count("|") % 2


def expressions(latex: str) -> list[str]:
    r"""The sides of a chain of equations, but for a name on its left, where math-verify would read the last one alone.

    >>> [expressions(text) for text in ("x^2 = 4", "f(x) = 1 = 4", "x = 4", "x = 1, y = 2", "4")]
    [['x^2', '4'], ['1', '4'], [], [], []]
    """
    outermost = _outermost(latex)
    found: list[str] = []
    start = 0
    for end, after in [*(comma.span() for comma in _COMMA.finditer(outermost)), (len(latex), len(latex))]:
        signs = [start - 1, *(sign.start() for sign in _EQUALS.finditer(outermost, start, end)), end]
        sides = [latex[left + 1 : right].strip() for left, right in itertools.pairwise(signs)]
        if not sides[0] or is_name(sides[0]):
            sides = sides[1:]
        found += sides if len(signs) > 3 or len(sides) > 1 else []
        start = after
    return found


def is_name(latex: str) -> bool:
    r"""Whether it names something, as a letter does, and is not an expression.

    >>> [is_name(text) for text in ("x", "(x, y)", "f(x)", r"\angle ABC", "S_{10}", "P(A)", "x^2", "a + b", "2")]
    [True, True, True, True, True, True, False, False, False]
    """
    plain = _STYLE.sub("n", latex)
    plain = _ARGUMENTS.sub("", _SUBSCRIPT.sub("", plain))
    return any(map(str.isalpha, plain)) and not _OPERATION.search(plain)


def is_denied(text: str) -> bool:
    """Whether a text without a marked answer says of a number that it is not the answer.

    >>> [is_denied(text) for text in ("The answer is not 4", "The answer is 4, not 5.", "It isn't 4.", "So 4.")]
    [True, False, True, False]
    """
    word = text.lower().rfind("answer")
    if word >= 0:
        return _DENIAL.search(_STATEMENT.split(text[word:], maxsplit=1)[0]) is not None
    end = max(map(text.rfind, "0123456789"))
    return _DENIED_NUMBER.search(text[text.rfind("\n", 0, end + 1) + 1 :].partition("\n")[0]) is not None


def _outermost(latex: str) -> str:
    """The LaTeX with a point for each character in brackets and environments, so that places stay the same."""
    latex = _ENVIRONMENT.sub(lambda found: "." * len(found.group()), latex)
    depth = 0
    masked = []
    for character in latex:
        depth -= character in ")]}" and depth > 0
        masked.append("." if depth else character)
        depth += character in "([{"
    return "".join(masked)


def unmarked(text: str) -> str:
    """Where math-verify is to look for an answer that nothing marks: the end, or what follows the last "answer"."""
    start = max(len(text) - TAIL_CHARACTERS, 0)
    word = text.lower().rfind("answer")
    return text[word : word + TAIL_CHARACTERS] if 0 <= word < start else text[start:]


def readable(latex: str) -> str:
    r"""The answer in a form that math-verify reads: degrees as LaTeX, `\binom52` with braces, 2 > x > 1 turned round.

    >>> [readable(text) for text in ("30°", r"\binom52", r"2 > x \ge 1", "12.", r"\text{a}")]
    ['30^\\circ', '\\binom{5}{2}', '1 \\le x < 2', '12', '\\text{a}']
    """
    latex = latex.replace("°", r"^\circ").strip().removesuffix(".")
    latex = _SHORT_BINOMIAL.sub(r"\\binom{\1}{\2}", latex)
    if found := _FALLING.fullmatch(latex):
        high, first, middle, second, low = found.groups()
        low_sign, high_sign = ("<" if sign == ">" else "\\le" for sign in (second, first))
        return f"{low.strip()} {low_sign} {middle.strip()} {high_sign} {high.strip()}"
    return latex


def answer_text(parsed: list[Any]) -> str:
    """One text for equal answers, of what math-verify parsed: an expression and its LaTeX; empty if it is neither."""
    import sympy

    latex = next((normalised(item) for item in parsed if isinstance(item, str)), "")
    expression = parsed[0] if parsed else ""
    if isinstance(expression, str) or not _is_small(expression):
        return latex
    try:
        return _text(expression)
    except (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError):
        return latex
    except sympy.PolynomialError:  # such as for a set within a sum
        return latex


def _text(expression: Any) -> str:
    import sympy

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
    if isinstance(expression, sympy.core.relational.Relational):
        return str(expression.canonical)
    if isinstance(expression, sympy.And):
        return ", ".join(sorted(map(_text, expression.args)))
    return _value_text(expression.doit())


def _value_text(value: sympy.Expr) -> str:
    import sympy

    if value.has(sympy.Float):
        value = sympy.nsimplify(value, rational=True)
    if value.is_Rational or not value.is_number:
        return str(sympy.cancel(value))
    return str(sympy.N(value, 12)) if value.is_finite else str(value)


def _is_small(expression: Any) -> bool:
    """Whether it has few parts and no large power or factorial, so that its value is worked out in no time."""
    import sympy

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
    """How many terms it has at most when it is expanded; 1 if it is a text.

    >>> import sympy; terms(sympy.sympify("(x + y + 1)**3 * (x + 2)"))
    20.0
    """
    import sympy

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
