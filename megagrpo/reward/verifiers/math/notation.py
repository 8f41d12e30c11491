r"""Ways to write an answer as the LaTeX that math-verify reads: Unicode, money, 1.5e-3, 0.\overline{3}, boxes."""

from __future__ import annotations

import re
import unicodedata

from megagrpo.reward.answer_text import plain

_SIGNS = {
    "∞": "\\infty", "π": "\\pi", "θ": "\\theta", "α": "\\alpha", "β": "\\beta", "γ": "\\gamma", "λ": "\\lambda",
    "μ": "\\mu", "φ": "\\varphi", "ω": "\\omega", "σ": "\\sigma", "δ": "\\delta", "×": "\\times", "·": "\\cdot",
    "⋅": "\\cdot", "÷": "\\div", "≤": "\\le", "⩽": "\\le", "≥": "\\ge", "⩾": "\\ge", "≠": "\\ne", "≡": "\\equiv",
    "≈": "\\approx", "±": "\\pm", "∪": "\\cup", "∩": "\\cap", "∈": "\\in", "∅": "\\emptyset", "°": "^\\circ",
}  # fmt: skip
_TABLE = str.maketrans(
    {sign: f"{latex} " for sign, latex in _SIGNS.items()} | {"−": "-", "′": "'", "，": ", ", "…": "...", "⁄": "/"}
)
_RAISED = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ]+")
_LOWERED = re.compile(r"[₀₁₂₃₄₅₆₇₈₉₊₋ₙ]+")
_VULGAR = re.compile(r"[¼-¾⅐-⅞]")
_ROOT = re.compile(r"([√∛∜])\s*(\d+(?:\.\d+)?|[A-Za-z]|\(([^()]*)\)|\{([^{}]*)\})")
_MONEY = re.compile(r"\\\$|[€£¥₹]|\A\s*\$(?=[-+]?[\d.][\d.,{}\\! ]*\Z)")
_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\\[,;: ]|[~ \u00a0\u2009\u202f])\d{3})+(?!\d)")
_UNIT_OF_ASIA = re.compile(
    r"(?<=\d)\s*(?![^\d]*[一二三四五六七八九十百千万亿億兆半分不非无無])[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{1,4}\Z"
)
_SHORT_BINOMIAL = re.compile(r"\\[dt]?binom\s*(\w)\s*(\w)")
_CHOOSE = re.compile(r"\{\s*(\w+)\s*\\choose\s*(\w+)\s*\}|(?:\{\s*\})?(?:\^|_)\{?(\w+)\}?\s*C_\{?(\w+)\}?")
_C = re.compile(r"(?<![A-Za-z\\])C\s*\(\s*(\w+)\s*,\s*(\w+)\s*\)")
_VECTOR = re.compile(
    r"\\(?:vec|mathbf|boldsymbol|bm|overrightarrow)\s*(?:\{\s*([A-Za-z])\s*\}|([A-Za-z])(?![A-Za-z]))"
    r"|\\hat\s*\{?\s*(?:\\([ij])math|([ijk])(?![A-Za-z]))\s*\}?"
)
_REPEATING = re.compile(
    r"(\d*)\.(\d*)(?:\\(?:overline|bar)\s*\{?(\d+)\}?|((?:\\dot\s*\{?\d\}?)\d*(?:\\dot\s*\{?\d\}?)?)|\((\d+)\))"
)
_GOING_ON = re.compile(r"(\d*)\.(\d*?)(\d+?)\3{2,}(?:\.{3}|\\[lc]?dots)")
_EXPONENT = re.compile(r"(?<![\w.\\}])(\d+(?:\.\d+)?|\.\d+)[eE]([-+]?)(\d+)(?![\w.^])")
_BOUND = r"([^<>=\\]+|\\?[^<>=\\]*\\infty[^<>=\\]*)"
_FALLING = re.compile(rf"\s*{_BOUND}(>|\\geq?(?![a-z]))([^<>=\\]+)(>|\\geq?(?![a-z])){_BOUND}\s*")
_BOXED = re.compile(
    r"((?:[A-Za-z]|\\[a-z]+)(?:_\{?\w+\}?)?\s*=\s*)?\\boxed\s*\{([^{}]*(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}[^{}]*)*)\}"
)
_BETWEEN = re.compile(r"(?:[\s$,;&.]|\\[()\[\],;]|\\q?quad|\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)*")


def readable(latex: str) -> str:
    r"""Returns the answer in a form that math-verify reads.

    >>> [readable(text) for text in ("30°", r"\binom52", r"2 > x \ge 1", "12.", r"\text{a}", "1½", "√2")]
    ['30^\\circ', '\\binom{5}{2}', '1 \\le x < 2', '12', '\\text{a}', '1\\frac{1}{2}', '\\sqrt{2}']
    >>> [readable(text) for text in (r"\$1{,}200", r"1\,200\,000", r"0.1\overline{6}", "0.333...", "17个", r"\vec{a}")]
    ['1{,}200', '1200000', '\\frac{15}{90}', '\\frac{3}{9}', '17', 'a']
    """
    latex = in_ascii(latex).replace("{:}", ":").strip()
    latex = latex if latex.endswith("..") else latex.removesuffix(".")
    latex = _UNIT_OF_ASIA.sub("", _MONEY.sub("", latex)).strip()
    latex = _GROUPS.sub(lambda number: re.sub(r"\D", "", number.group()), latex)
    latex = _GOING_ON.sub(_fraction, _REPEATING.sub(_fraction, latex))
    latex = _SHORT_BINOMIAL.sub(r"\\binom{\1}{\2}", latex)
    latex = _CHOOSE.sub(lambda sizes: f"\\binom{{{sizes[1] or sizes[3]}}}{{{sizes[2] or sizes[4]}}}", latex)
    latex = _VECTOR.sub(lambda names: f"{next(filter(None, names.groups()))} ", latex).strip()
    if falling := _FALLING.fullmatch(latex):
        high, first, middle, second, low = falling.groups()
        low_sign, high_sign = ("<" if sign == ">" else "\\le" for sign in (second, first))
        return f"{low.strip()} {low_sign} {middle.strip()} {high_sign} {high.strip()}"
    return latex


def readings(latex: str) -> list[str]:
    r"""Returns the readings of `readable` LaTeX: 2e-3 is 0.002 or 2·e - 3, C(5,2) a number or the point C, 1e10 one.

    >>> readings("1e10"), readings("2e-3"), readings("10e"), readings("C(5,2)")
    (['1\\times 10^{10}'], ['2\\times 10^{-3}', '2e-3'], ['10e'], ['\\binom{5}{2}', 'C(5,2)'])
    """
    first = [_C.sub(r"\\binom{\1}{\2}", _EXPONENT.sub(_power, latex))]
    as_it_is = any(sign and mantissa.isdigit() and mantissa != "1" for mantissa, sign, _ in _EXPONENT.findall(latex))
    return [*first, latex] if as_it_is or _C.search(latex) else first


def in_ascii(text: str) -> str:
    r"""Returns the text with Unicode's signs for mathematics as LaTeX.

    >>> in_ascii("２½ ≤ x² + √(y)")
    '2\\frac{1}{2} \\le  x^{2} + \\sqrt{y}'
    """
    if text.isascii():
        return text
    text = _ROOT.sub(lambda root: f"\\sqrt{_ORDER[root[1]]}{{{root[3] or root[4] or root[2]}}}", plain(text))
    text = _RAISED.sub(lambda digits: f"^{{{_normal(digits)}}}", text)
    text = _LOWERED.sub(lambda digits: f"_{{{_normal(digits)}}}", text)
    text = _VULGAR.sub(lambda sign: "\\frac{{{}}}{{{}}}".format(*_normal(sign).split("\u2044")), text)
    return text.translate(_TABLE)


def joined_boxes(text: str) -> str:
    r"""Returns the boxes of one sentence at the end of a text, each with the name before it; empty for a single box.

    >>> joined_boxes(r"So $x=\boxed{2}$ and $y=\boxed{3}$."), joined_boxes(r"\boxed{2}, no: \boxed{3}")
    ('x=2, y=3', '')
    """
    boxes: list[re.Match[str]] = []
    for box in _BOXED.finditer(text):
        boxes = [*boxes, box] if boxes and _BETWEEN.fullmatch(text, boxes[-1].end(), box.start()) else [box]
    return ", ".join(f"{box[1] or ''}{box[2]}" for box in boxes) if len(boxes) > 1 else ""


_ORDER = {"√": "", "∛": "[3]", "∜": "[4]"}


def _normal(signs: re.Match[str]) -> str:
    return unicodedata.normalize("NFKC", signs.group())


def _power(number: re.Match[str]) -> str:
    return f"{number[1]}\\times 10^{{{number[2].removeprefix('+')}{number[3]}}}"


def _fraction(number: re.Match[str]) -> str:
    """Returns a decimal whose last digits repeat as a fraction: 0.1 and 6 is (16 - 1) / 90."""
    whole, once, *repeated = number.groups()
    again = re.sub(r"\D", "", next(filter(None, repeated)))
    numerator = int(f"{whole}{once}{again}") - int(f"{whole}{once}" or 0)
    return f"\\frac{{{numerator}}}{{{(10 ** len(again) - 1) * 10 ** len(once)}}}"
