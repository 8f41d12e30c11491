"""A run's report as one web page that needs nothing else: no network, no other files. Several runs share it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from megagrpo.errors import Problem, ReportError
from megagrpo.plan.show.page import PALETTE
from megagrpo.report.parts import Part, curve_parts, embed, encode, settings_parts, timing_parts
from megagrpo.report.run import RunRead
from megagrpo.report.samples import sample_parts

FOLDER = Path(__file__).parent
STYLES = ("vendor/uPlot.min.css", "page.css")
SCRIPTS = ("page.js", "vendor/uPlot.iife.min.js", "charts.js")
"""Scripts of every page, in this order, before the scripts of its parts."""
GENERATOR = '<meta name="generator" content="megagrpo report">'
"""The mark of a page that a later report may replace."""


def parts(runs: Sequence[RunRead], samples: int | None = None) -> list[Part]:
    """Returns the sections of the page of these runs. The others are compared with the first run. samples: as for
    `sample_parts`."""
    return [*curve_parts(runs), *sample_parts(runs, samples), *timing_parts(runs), *settings_parts(runs)]


def page(runs: Sequence[RunRead], *, samples: int | None = None) -> str:
    """Returns the whole page, in HTML. samples: as for `parts`."""
    return page_of(parts(runs, samples), runs)


def page_of(shown: Sequence[Part], runs: Sequence[RunRead], *, live: bool = False) -> str:
    """Returns the page of these parts. live: it asks its own server for changed parts and for late columns."""
    styles = dict.fromkeys((*STYLES, *(style for part in shown for style in part.styles)))
    scripts = [_text(name) for name in dict.fromkeys((*SCRIPTS, *(name for part in shown for name in part.scripts)))]
    title = escape(" · ".join(run.name for run in runs))
    links = "".join(f'<a href="#{part.anchor}">{escape(part.title)}</a>' for part in shown)
    sections = "".join(
        f'<section id="{part.anchor}" aria-labelledby="{part.anchor}-title"><h2 id="{part.anchor}-title">'
        f"{escape(part.title)}</h2>\n<div class=body>{part.html}</div></section>\n"
        for part in shown
    )
    return f"""<!doctype html>
<html lang="en" data-palette="{" ".join(PALETTE)}"{" data-live" if live else ""}>
<head><meta charset="utf-8">{GENERATOR}<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">
<title>{title}: report</title>
<style>{"".join(map(_text, styles))}</style></head>
<body>
<header><h1>{title}</h1><nav aria-label="sections">{links}</nav>
<button id="theme" type="button" class="control">light or dark</button></header>
<main>
{sections}</main>
{"".join(embed(name, encode(columns)) for part in shown for name, columns in part.data.items())}
{"".join(f"<script>{text}</script>" for text in scripts)}
{"".join(embed(name, encoded) for part in shown if not live for name, encoded in part.late.items())}
</body></html>
"""


def write_page(path: Path, text: str) -> None:
    """Writes the page to `path`, whole or not at all. Raises ReportError, for example if another file is there."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        if path.exists() and GENERATOR not in path.read_text(encoding="utf-8", errors="replace")[:1000]:
            needed = "a file that does not exist, or an earlier report"
            raise ReportError(Problem(str(path), "it exists and is no report", needed, "--output FILE"))
        partial.write_text(text, encoding="utf-8", errors="replace")
        partial.replace(path)
    except OSError as error:
        given = f"{error.strerror}".lower()
        raise ReportError(Problem(str(path), given, "a file that can be written", "--output FILE")) from error


def _policy(scripts: Iterable[str]) -> str:
    """Returns the policy: only the page's own scripts run, whatever samples say, and the page asks only its server."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def _text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
