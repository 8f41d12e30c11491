r"""The content of the last box of a LaTeX text: data is prepared and responses are read by the same rule."""

from __future__ import annotations

import re

# A box without braces has a number, a command or a letter: \boxed 5, \boxed\frac{1}{2}, $\boxed x$. Words are prose.
BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{|(?=[-+]?[.]?\d|[-+]?\\[A-Za-z{]|[A-Za-z]\s*\$))")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is none
_BARE = re.compile(r"(?:(?!\\[)\]])[^\s$])+")


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{…}` or `\fbox{…}`; without braces, it ends at white space or
    the end of the formula; None if there is no box, or if it is not closed.

    >>> last_boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}}"), last_boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}")
    ('\\frac{1}{2}', None)
    >>> last_boxed(r"$\boxed 5$."), last_boxed(r"\(\boxed\frac{1}{2}\)"), last_boxed(r"\boxed{5}, by \boxed as asked")
    ('5', '\\frac{1}{2}', '5')
    """
    box = None
    for found in BOX.finditer(text):
        box = found
    if box is None:
        return None
    if not box.group(1):
        bare = _BARE.match(text, box.end())
        return bare.group().rstrip(".,;") if bare else None
    depth = 1
    for brace in _BRACE.finditer(text, box.end()):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[box.end() : brace.start()]
    return None
