"""A plan as one page without scripts or other files: the devices by stage, the terminal's text, and the recipe."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from io import StringIO
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from megagrpo.errors import MegagrpoError, PreflightError, Problem
from megagrpo.plan.advice import impossible
from megagrpo.plan.case import MappedDevice
from megagrpo.plan.plan import Plan
from megagrpo.plan.search import Search
from megagrpo.plan.show.terminal import WIDTH_MAX, draw
from megagrpo.recipe.load import dump

PALETTE = (
    "#4e79c4", "#e08a3c", "#58a55c", "#b55d9c", "#3fa7b5", "#c9605b", "#8f75c9", "#b59b3a", "#6b8e9e", "#d07a9a",
    "#7aa344", "#a0785a", "#5b6ab0", "#c77f6e", "#4f9e86", "#9a9a52",
)  # fmt: skip
ANSI = (8, 5, 2, 1, 0, 3, 4, 15, 8, 13, 10, 7, 12, 9, 14, 15)
"""Places in PALETTE of a terminal's black, red, green, yellow, blue, magenta, cyan and white, plain and bright."""
STYLE = Path(__file__).with_name("page.css")
GENERATOR = '<meta name="generator" content="megagrpo plan">'
"""The mark of a page that a later plan may replace."""


def page(plan: Plan, search: Search | None = None) -> str:
    """Returns the whole page, in HTML: the devices, and the terminal's text with its colours."""
    title, console = escape(plan.recipe.name), Console(file=StringIO(), width=WIDTH_MAX, highlight=False, record=True)
    draw(plan, search, console)
    colours = [_rgb(PALETTE[place]) for place in ANSI]
    theme = TerminalTheme(_rgb("#ffffff"), _rgb("#000000"), colours[:8], colours[8:])
    text = console.export_html(theme=theme, code_format="{code}", inline_styles=True)
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8">{GENERATOR}<meta name="viewport" content="width=device-width"><title>Plan of {title}</title>
<style>{STYLE.read_text(encoding="utf-8")}</style></head>
<body><main>
<h1>{title}</h1>
{"".join(f'<pre class="bad">This cannot run: {escape(str(problem))}</pre>' for problem in impossible(plan))}
{"".join(_devices(plan))}
<pre>{text}</pre>
<details><summary>The recipe, with every default</summary><pre>{escape(dump(plan.recipe))}</pre></details>
</main></body></html>
"""


def write_page(path: Path, text: str, mark: str = GENERATOR, failure: type[MegagrpoError] = PreflightError) -> None:
    """Writes a page to `path`, whole or not at all. Raises `failure` if it fails, or if a file without `mark` is
    there."""
    where, partial = str(path), path.with_name(f".{path.name}.partial")
    try:
        if path.exists() and mark not in path.read_text(encoding="utf-8", errors="replace")[:1000]:
            given, needed = "it exists and is no such page", "a file that does not exist, or an earlier page"
            raise failure(Problem(where, given, needed, "choose another place, or remove it yourself"))
        partial.write_text(text, encoding="utf-8", errors="replace")
        partial.replace(path)
    except OSError as error:
        raise failure(Problem(where, f"{error.strerror}".lower(), "a file that can be written")) from error


def _rgb(colour: str) -> tuple[int, int, int]:
    red, green, blue = bytes.fromhex(colour[1:])
    return red, green, blue


def stage_colour(stage: int, stages: int) -> str:
    """Returns a stage's colour: hues go around the circle, lightness alternates. Readable on white and on black."""
    hue = (210 + 360 * stage / max(stages, 2)) % 360
    return f"hsl({hue:.0f} 45% {52 if stage % 2 else 60}%)"


def _devices(plan: Plan) -> Iterator[str]:
    """Yields a line for each node with a square for each of its devices, and the meaning of the colours."""
    yield "<div class=nodes>"
    for node, devices in groupby(plan.device_map, lambda mapped: mapped.node):
        yield f"<div><b>{node}</b>{''.join(_square(plan, mapped) for mapped in devices)}</div>"
    yield "</div>\n<p>A row is a node. A dot marks the first device of an engine, a dash its other devices.</p>\n<p>"
    for index, stage in enumerate(plan.stages):
        yield f'<i style="background:{stage_colour(index, len(plan.stages))}"></i> stage {index}: {stage.text}<br>'
    if any(mapped.rank is None for mapped in plan.device_map):
        yield "<i></i> engines or other models only"
    yield "</p>"


def _square(plan: Plan, mapped: MappedDevice) -> str:
    lines, style = [f"node {mapped.node}, GPU {mapped.gpu}"], ""
    if (rank := mapped.rank) is not None:
        style = f' style="background:{stage_colour(rank.pipeline, len(plan.stages))}"'
        lines.append(f"rank {rank.rank}: tensor {rank.tensor}, context {rank.context}, data {rank.data}")
        lines.append(f"pipeline stage {rank.pipeline}: {plan.stages[rank.pipeline].text}")
        lines.append(f"expert {rank.expert}, expert_tensor {rank.expert_tensor}, expert_data {rank.expert_data}")
    if mapped.engines:
        lines.append(f"engine {', '.join(map(str, mapped.engines))}, its tensor rank {mapped.engine_rank}")
    mark = "" if not mapped.engines else "•" if mapped.engine_rank == 0 else "-"
    title = "\n".join(lines)
    return f'<i title="{title}"{style}>{mark}</i>'
