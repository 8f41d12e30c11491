r"""Mathematical answers compared as texts: the last `\boxed{}`, or Minerva's "The final answer is X."

What counts as one text follows Hendrycks et al. (arXiv:2103.03874) and Lewkowycz et al. (arXiv:2206.14858, appendix D):
ways of writing the same LaTeX, units, and commas of thousands. Values are not compared: 1/2 and 0.5 are two texts.
"""

from __future__ import annotations

import re
from functools import lru_cache

from megagrpo.reward.answer_text import after_thinking, final_answer, last_boxed
from megagrpo.reward.functions import RewardCallable, RewardReturn

ANSWER_CHARACTERS_MAX = 2000
"""A longer answer is none."""

# Two backslashes begin a row of a matrix: group 1 is kept.
_DROPPED = re.compile(
    r"(\\\\)|\\left(?![a-z])|\\right(?![a-z])|\\displaystyle|\\[!,;: ]|~|\\?\$|\^\s*(?:\\circ|\{\s*\\circ\s*\})|°|\\?%"
)
_STYLED = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_WORD = (
    r"(?:square |cubic |sq\.? )?(?:units?|degrees?|radians?|dollars?|cents?|points?"
    r"|hours?|minutes?|seconds?|days?|weeks?"
    r"|months?|years?|inch(?:es)?|feet|foot|ft|yards?|miles?|mph|meters?|metres?|mm|cm|km|lit(?:er|re)s?|ounces?|grams?|gm|kg"
    r"|pounds?|tons?|ways?|people|students|percent)"
)
_PER = rf"(?:(?: per |/)(?:{_WORD}|s|h))?"
_POWER = r"(?:\s*\^\s*\{?\s*[23]\s*\}?)?"
# Behind a number or bracket: in \text{} a word for a unit, or m; without it m only after a blank (10m is 10 times m).
_UNIT = re.compile(
    rf"(?<=[\d}}.)])(?:\s*\\(?:text|mbox|mathrm)\s*\{{\s*(?:{_WORD}|m){_PER}{_POWER}\.?\s*\}}|\s*{_WORD}{_PER}|\s+m)"
    rf"{_POWER}\s*$"
)
# Not of a tuple, set or interval: (1,234) is a point.
_THOUSANDS = re.compile(r"(?<![\d.(\[])(?<![(\[]-)(?<!\\\{)(?<!\\\{-)\d{1,3}(?:,\d{3})++(?![\d)\]]|\\\})")
_GROUPS = re.compile(r"(?<=\d)(?:\{,\}|,\\!)(?=\d{3}(?!\d))")  # commas that LaTeX sets without a blank: of thousands
_NAME = re.compile(r"^\s*(?:[A-Za-z]|\\[a-z]+|[a-z]\([a-z]\))\s*(?:=|\\in(?![a-z]))\s*(?=\S)")
_SHORT_FRACTION = re.compile(r"\\frac\s*(\{[^{}]*\}|\d|[a-z])\s*(\{[^{}]*\}|\d|[a-z])")
_SHORT_ROOT = re.compile(r"\\sqrt\s*(\d|[a-z])")
_SLASH = re.compile(r"(-?)(\d+)/(\d+)")
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])")


def make() -> RewardCallable:
    r"""Makes a reward function: 1.0 if the last `\boxed{}` or "The final answer is X." is the ground truth, else 0.0.

    Compares normalised texts. The ground truth is LaTeX, `$` or `\boxed{}` allowed. Raises ValueError if it is empty.

    >>> verify = make(); verify(response=r"So it is $\boxed{\dfrac 12}$.", ground_truth=r"\frac{1}{2}")
    {'score': 1.0, 'answer': '\\frac{1}{2}'}
    >>> verify(response="Final Answer: The final answer is $1{,}234$. I hope it is correct.", ground_truth="1234")
    {'score': 1.0, 'answer': '1234'}
    >>> verify(response="It is 1234.", ground_truth="1234"), verify(response=r"\boxed{0.50}", ground_truth="1/2")
    ({'score': 0.0}, {'score': 0.0, 'answer': '0.5'})
    """

    def strict_math(response: str, ground_truth: str, prompt_text: str = "") -> RewardReturn:
        truth = _truth(ground_truth)
        given = final_answer(after_thinking(response, prompt_text))
        if given is None or len(given) > ANSWER_CHARACTERS_MAX:
            return {"score": 0.0}
        answer = normalised(given)
        return {"score": float(answer == truth), "answer": answer}

    return strict_math


def solution(ground_truth: str) -> str:
    """Returns a right response: the ground truth in a box, unless it has one."""
    return ground_truth if "\\boxed" in ground_truth else f"\\boxed{{{ground_truth.strip().strip('$')}}}"


def normalised(latex: str) -> str:
    r"""Returns one text for the ways to write an answer in LaTeX.

    >>> [normalised(text) for text in (r"x = \tfrac34", "3/4", r"\left( 1,\, 2 \right)", r"12\text{ cm}^2", "-.50")]
    ['\\frac{3}{4}', '\\frac{3}{4}', '(1,2)', '12', '-0.5']
    """
    text = _GROUPS.sub("", latex.replace("\u2212", "-")).replace("{,}", ",").replace("\n", " ").replace("\\!", "")
    text = re.sub(r"\\[dtc]frac(?![a-z])", r"\\frac", text)
    text = _DROPPED.sub(r"\1", text).strip().removesuffix(".").strip()
    text = _NAME.sub("", text)
    text = _UNIT.sub("", _STYLED.sub(r"\1", _UNIT.sub("", text)))
    text = _THOUSANDS.sub(lambda number: number.group().replace(",", ""), text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    text = _SHORT_FRACTION.sub(lambda parts: f"\\frac{{{parts[1].strip('{}')}}}{{{parts[2].strip('{}')}}}", text)
    text = "".join(text.split()).removeprefix("+")
    if slash := _SLASH.fullmatch(text):
        text = f"{slash[1]}\\frac{{{slash[2]}}}{{{slash[3]}}}"
    return _DECIMAL.sub(_decimal, text)


def _decimal(number: re.Match[str]) -> str:
    return f"{number[1] or '0'}.{number[2]}".rstrip("0").removesuffix(".")


@lru_cache(maxsize=65536)
def _truth(ground_truth: str) -> str:
    boxed = last_boxed(ground_truth)
    truth = normalised(ground_truth if boxed is None else boxed)
    if not truth:
        raise ValueError(f"the ground truth {ground_truth[:200]!r} is empty")
    return truth
