"""The tables of docs/moving/: each framework's options beside ours, made from what `megagrpo import` reads.

python -m tools.moving_tables docs/moving
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

from megagrpo.importing.read import FRAMEWORKS
from megagrpo.importing.rows import ABSENT, Row
from megagrpo.importing.translate import Framework

GROUP_MIN = 4
BEGIN, END = "<!-- options: begin -->", "<!-- options: end -->"


def with_tables(page: str, framework: Framework) -> str:
    """Returns the page with the framework's tables between BEGIN and END. Raises ValueError if it lacks one of them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"a page with {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{tables(framework)}{END}{after}"


def tables(framework: Framework) -> str:
    """Returns Markdown: a table for each group of options; in it, those that become fields come first."""
    lines, groups = [""], _groups(framework)
    for prefix, options in groups.items():
        if len(groups) > 1:
            lines.append(f"### `{prefix}.`" if prefix else "### Others")
        lines += ["", f"| {framework.title} | default there | here | what differs, or what is here in its place |"]
        lines += ["|---|---|---|---|"]
        of_fields = [option for option in options if framework.table[option].fields]
        others = [option for option in options if option not in of_fields]
        lines += [_line(option, prefix, framework.table[option]) for option in (*of_fields, *others)]
        lines.append("")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def _groups(framework: Framework) -> dict[str, list[str]]:
    """Splits options by the longest prefix that at least GROUP_MIN options have."""
    parts = {option: option.split(".") for option in framework.table}
    prefixes = [".".join(names[:length]) for names in parts.values() for length in range(1, len(names))]
    common = {prefix for prefix, count in Counter(prefixes).items() if count >= GROUP_MIN} | {""}
    groups: dict[str, list[str]] = {}
    for option, names in parts.items():
        above = [".".join(names[:length]) for length in range(len(names) - 1, -1, -1)]
        groups.setdefault(next(prefix for prefix in above if prefix in common), []).append(option)
    return groups


def _line(option: str, prefix: str, row: Row) -> str:
    shown = "null" if row.default is None else str(row.default)
    default = "" if row.default is ABSENT else f"`{shown}`"
    field = f"`{row.fields}`" if row.fields else ""
    note = row.page_note or ("" if row.to else row.same or row.missing)
    return f"| `{option.removeprefix(f'{prefix}.')}` | {default} | {field} | {_cell(note)} |"


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\|", text)


def main(folder: Path) -> None:
    for name, framework in FRAMEWORKS.items():
        path = folder / f"{name}.md"
        path.write_text(with_tables(path.read_text(encoding="utf-8"), framework), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
