"""A plan as one web page that needs nothing else: no scripts, no other files; light or dark as the reader's system."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from megagrpo.errors import PreflightError, Problem
from megagrpo.plan.device_map import MappedDevice, axes, ranks_text
from megagrpo.plan.memory import PhaseMemory
from megagrpo.plan.parameters import Stage
from megagrpo.plan.plan import Plan
from megagrpo.plan.search import Choice, Search
from megagrpo.plan.show import schedules
from megagrpo.plan.time import StepTime
from megagrpo.plan.units import byte_text, second_text, spans
from megagrpo.recipe.load import dump

KINDS_MAX = 12
PALETTE = (
    "#4e79c4", "#e08a3c", "#58a55c", "#b55d9c", "#3fa7b5", "#c9605b", "#8f75c9", "#b59b3a", "#6b8e9e", "#d07a9a",
    "#7aa344", "#a0785a", "#5b6ab0", "#c77f6e", "#4f9e86", "#9a9a52",
)  # fmt: skip
STYLE = Path(__file__).with_name("page.css")
GENERATOR = '<meta name="generator" content="megagrpo plan">'
"""The mark of a page that a later plan may replace."""
WIDTH, LABEL, BAR_LABEL, BAR_HEIGHT = 960, 46, 110, 18


def page(plan: Plan, search: Search | None = None) -> str:
    """Returns the whole page, in HTML."""
    colours = (f".part{index} {{ fill: {colour}; background: {colour}; }}\n" for index, colour in enumerate(PALETTE))
    title = escape(plan.recipe.name)
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8">{GENERATOR}<meta name="viewport" content="width=device-width"><title>Plan of {title}</title>
<style>{STYLE.read_text(encoding="utf-8")}{"".join(colours)}</style></head>
<body><main>
<h1>{title}</h1>
<div class="soft">{escape(plan.summary["model"])}</div>
{_chips(plan)}
{"".join(_sections(plan, search))}
</main></body></html>
"""


def write_page(path: Path, text: str) -> None:
    """Writes the page to `path`, whole or not at all. Raises PreflightError if it fails, or another file is there."""
    where, partial = f"--html {path}", path.with_name(f".{path.name}.partial")
    try:
        if path.exists() and GENERATOR not in path.read_text(encoding="utf-8", errors="replace")[:1000]:
            given, needed = "it exists and is no page of a plan", "a file that does not exist, or an earlier page"
            raise PreflightError(Problem(where, given, needed, "choose another place, or remove it yourself"))
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise PreflightError(Problem(where, f"{error.strerror}".lower(), "a file that can be written")) from error


def _sections(plan: Plan, search: Search | None) -> Iterator[str]:
    for heading, kind, problems in (("This cannot run", "bad", plan.problems), ("Unwise", "unwise", plan.unwise)):
        if problems:
            yield _section(heading, "".join(map(_problem, problems)), kind)
    yield _section("Where", _where(plan))
    if plan.memory:
        yield _section(f"Memory of each {plan.noun}", _memory(plan))
    if plan.estimate:
        yield _section(f"A step: {schedules.headline(plan.estimate.time, plan.own)}", _time(plan.estimate.time))
    if plan.schedules:
        yield _section("Schedules, simulated", _schedules(plan))
    if search:
        yield _section(f"Fastest of {search.legal} legal layouts for {search.gpus} GPUs", _search(search))
    if plan.estimate:
        lines = []
        for assumed in plan.assumed:
            value = "follows" if assumed.value is None else f"{assumed.value:g}"
            origin = "" if assumed.origin == "default" else f"<b>{assumed.origin}</b>"
            lines.append((assumed.name, value, assumed.unit, origin))
        half = -(-len(lines) // 2)
        tables = (_table((), part, numbers=(1,)) for part in (lines[:half], lines[half:]))
        yield _section("Assumptions", f"<div class=columns>{''.join(tables)}</div>")
    whole = f"<summary>The recipe, with every default</summary><pre>{escape(dump(plan.recipe))}</pre>"
    yield _section("The recipe", f"{_facts(plan.told)}<br><details>{whole}</details>")


def _section(title: str, body: str, kind: str = "") -> str:
    return f'<section class="{kind}"><h2>{escape(title)}</h2>\n{body}</section>\n'


def _chips(plan: Plan) -> str:
    """Returns the figures to read first."""
    noun = "GPUs" if plan.device == "cuda" else "processes"
    card = f"of {byte_text(plan.card_bytes)} at most in use" if plan.card_bytes else "on the fullest"
    chips = [
        (str(len(plan.device_map)), f"{plan.gpus.gpu.name} {noun}" if plan.gpus else noun),
        (byte_text(plan.fullest_first[0].fullest.bytes), card),
    ]
    if plan.estimate:
        time = plan.estimate.time
        chips.append((second_text(time.seconds), "a step"))
        chips.append((f"{time.tokens_per_second_per_gpu:,.0f}", f"tokens/s/{plan.noun}"))
        if time.days is not None:
            chips.append((second_text(time.days * 86400), f"{time.steps} steps"))
    shown = (f"<div class=chip><b>{number}</b><span>{text}</span></div>" for number, text in chips)
    return f"<div class=chips>{''.join(shown)}</div>"


def _problem(problem: Problem) -> str:
    facts = {"given": problem.given, "needed": problem.needed, "fix": problem.fix}
    return f"<h3>{escape(problem.where)}</h3>{_facts((name, text) for name, text in facts.items() if text)}"


def _where(plan: Plan) -> str:
    legend = [
        (f'style="background:{stage_colour(i, len(plan.stages))}"', f"stage {i}: {stage.text}")
        for i, stage in enumerate(plan.stages)
    ]
    if any(mapped.rank is None for mapped in plan.device_map):
        legend.append(('style="background:#8b949e"', "engines or reward models only"))
    square = "Each row is a node and each square one GPU" if plan.device == "cuda" else "Each square is a process"
    note = f"{square}. A dot marks the first device of an engine, a bar its other devices."
    lines = [
        (axis.name, f"{axis.size}", f"{axis.stride}", ranks_text(axis.example), f"{axis.nodes}") for axis in axes(plan)
    ]
    table = _table(("axis", "ranks", "apart", "first group", "nodes"), lines, numbers=(1, 2, 4))
    grid = device_grid(plan.device_map, plan.stages, plan.recipe.cluster.gpus_per_node)
    return f'{grid}{_legend(legend)}<p class="soft">{note}</p>{f"<h3>Groups</h3>{table}" if lines else ""}'


def _memory(plan: Plan) -> str:
    kinds, fullest = plan.fullest_first, plan.fullest_first[0].fullest
    names = dict.fromkeys(part.name for kind in plan.memory for phase in kind.phases for part in phase.parts)
    colours = {name: index % len(PALETTE) for index, name in enumerate(names)}
    scale = max(plan.card_bytes or 0, fullest.bytes)
    bars = "".join(
        f"<h3>{kind.name}: {len(kind.devices)} of them, {spans(kind.devices)[:80]}</h3>"
        f"{memory_bars(kind.phases, colours, plan.card_bytes, scale)}"
        for kind in kinds[:KINDS_MAX]
    )
    legend = _legend((f'class="part{colour}"', name) for name, colour in colours.items())
    lines = [
        (part.name, byte_text(part.bytes), f"<code>{', '.join(part.lowered_by)}</code>") for part in fullest.largest
    ]
    table = _table(("item", "bytes", "lowered by"), lines, numbers=(1,), names=(0,))
    return f"{bars}{legend}<h3>{kinds[0].name} in {fullest.phase}, the fullest</h3>{table}"


def _time(time: StepTime) -> str:
    parts, lines = [], []
    for index, phase in enumerate(time.phases):
        seconds, colour = second_text(phase.seconds), index % len(PALETTE)
        parts.append((phase.phase, phase.seconds, seconds, colour))
        square = f'<span class="legend" style="margin:0"><span><i class="part{colour}"></i>{phase.phase}</span></span>'
        spent = ", ".join(f"{name} {second_text(each)}" for name, each in phase.largest)
        lines.append((square, seconds, f"{phase.seconds / time.phase_seconds:.0%}", spent))
    bar = _svg(36, _stacked(parts, 4, WIDTH / time.phase_seconds, left=0, height=28), "seconds of a step by phase")
    return bar + _table(("phase", "seconds", "share", "of which"), lines, numbers=(1, 2), names=(0,))


def _schedules(plan: Plan) -> str:
    lines = [(time.name, *schedules.figures(time, plan.schedules[0])) for time in plan.schedules]
    table = _table(("", *schedules.HEADS), lines, numbers=range(1, len(schedules.HEADS) + 1), names=(0,))
    told = schedules.judgement(plan.schedules, plan.grpo)
    return f"{table}<p>{escape(told)}</p>"


def _search(search: Search) -> str:
    if not search.choices:
        return "<p>Nothing fits.</p>"
    found = _choices((choice.estimate.time.seconds, choice) for choice in search.choices)
    if search.asynchronous:
        name = search.asynchronous[0].schedule.name
        found += f"<h3>If engines on GPUs of their own sample all the time ({name})</h3>"
        found += _choices((split.schedule.seconds, split) for split in search.asynchronous)
    return found


def _choices(timed: Iterable[tuple[float, Choice]]) -> str:
    lines = []
    for seconds, choice in timed:
        words = f"<code>{escape(choice.words) or 'the recipe as it is'}</code><br>{escape(choice.reason)}"
        lines.append((second_text(seconds), words))
    return _table(("a step", "overrides"), lines, numbers=(0,))


# --- elements --------------------------------------------------------------------------------------------------------


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<dt>{name}</dt><dd>{escape(text)}</dd>' for name, text in facts)}</dl>"


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    """Returns a legend of pairs: a square's attributes, and its meaning."""
    shown = "".join(f"<span><i {attributes}></i>{text}</span>" for attributes, text in entries)
    return f"<div class=legend>{shown}</div>"


def _table(
    heads: Sequence[str], lines: Iterable[Sequence[str]], numbers: Sequence[int] = (), names: Sequence[int] = ()
) -> str:
    """Returns a table of HTML cells. `numbers` are the columns set to the right, `names` those that do not wrap."""
    kinds = dict.fromkeys(numbers, " class=number") | dict.fromkeys(names, " class=name")
    shown = [f"<tr>{''.join(f'<th>{text}</th>' for text in heads)}</tr>" if heads else ""]
    for line in lines:
        cells = (f"<td{kinds.get(column, '')}>{cell}</td>" for column, cell in enumerate(line))
        shown.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(shown)}</table>"


# --- pictures --------------------------------------------------------------------------------------------------------


def stage_colour(stage: int, stages: int) -> str:
    """Returns a stage's colour: hues go around the circle, lightness alternates. Readable on white and on black."""
    hue = (210 + 360 * stage / max(stages, 2)) % 360
    return f"hsl({hue:.0f} 45% {52 if stage % 2 else 60}%)"


def device_grid(devices: Sequence[MappedDevice], stages: Sequence[Stage], per_node: int) -> str:
    """Draws one square for each device, a node to a line."""
    nodes = [list(group) for _, group in groupby(devices, lambda mapped: mapped.node)]
    cell = 26 if len(nodes) <= 16 else 14
    step = cell + 3
    block = LABEL + min(per_node, len(devices)) * step + 14
    lines = -(-len(nodes) // max(1, min(WIDTH // block, len(nodes))))
    drawn = []
    for index, node in enumerate(nodes):
        left, y = index // lines * block + LABEL, index % lines * step
        drawn.append(_label(str(node[0].node), left - 8, y + cell * 0.72))
        for mapped in node:
            x = left + mapped.gpu * step
            fill = f'fill="{stage_colour(mapped.stage, len(stages))}"' if mapped.rank else 'class="engines-only"'
            shapes = f'<rect x="{x}" y="{y}" width="{cell}" height="{cell}" rx="3" {fill}/>'
            if mapped.engines and mapped.engine_rank == 0:
                shapes += f'<circle cx="{x + cell / 2}" cy="{y + cell - 5}" r="2.6" class="engine"/>'
            elif mapped.engines:
                shapes += f'<rect x="{x}" y="{y + cell - 6}" width="{cell}" height="2" class="engine"/>'
            drawn.append(f"<g><title>{_told(mapped, stages)}</title>{shapes}</g>")
    return _svg(lines * step, drawn, "devices: a line for each node, a square for each GPU")


def _told(mapped: MappedDevice, stages: Sequence[Stage]) -> str:
    lines = [f"node {mapped.node}, GPU {mapped.gpu}"]
    if (rank := mapped.rank) is not None:
        lines.append(f"rank {rank.rank}: tensor {rank.tensor}, context {rank.context}, data {rank.data}")
        lines.append(f"pipeline stage {rank.pipeline}: {stages[rank.pipeline].text}")
        lines.append(f"expert {rank.expert}, expert_tensor {rank.expert_tensor}, expert_data {rank.expert_data}")
    if mapped.engines:
        lines.append(f"engine {', '.join(map(str, mapped.engines))}, its tensor rank {mapped.engine_rank}")
    return "\n".join(lines)


def memory_bars(phases: Iterable[PhaseMemory], colours: Mapping[str, int], card: int | None, scale: int) -> str:
    """Draws a bar for each phase, cut into its parts; a line marks the card's memory."""
    drawn, y, unit = [], 4, (WIDTH - BAR_LABEL - 230) / scale
    for phase in phases:
        parts = [(part.name, part.bytes, byte_text(part.bytes), colours[part.name]) for part in phase.parts]
        drawn += [_label(phase.phase, BAR_LABEL - 10, y + 13), *_stacked(parts, y, unit)]
        over = card is not None and phase.bytes > card
        share = f" · {phase.bytes / card:.0%}" if card else ""
        text = f"{byte_text(phase.bytes)}{share}" + (" · too much" if over else "")
        x = BAR_LABEL + max(phase.bytes, card or 0) * unit + 10
        drawn.append(f'<text x="{x:.1f}" y="{y + 13}" class="label{" over" if over else ""}">{text}</text>')
        y += BAR_HEIGHT + 8
    if card is not None:
        x = BAR_LABEL + card * unit
        drawn.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{y - 4}" class="card"/>')
    return _svg(y, drawn, "memory by phase")


def _stacked(
    parts: Iterable[tuple[str, float, str, int]], y: int, unit: float, left: int = BAR_LABEL, height: int = BAR_HEIGHT
) -> Iterator[str]:
    """Draws a bar's parts: name, size, text and colour of each."""
    x = float(left)
    for name, size, text, colour in parts:
        width = size * unit
        if width > 0.2:
            inside = f'<text x="{x + 6:.1f}" y="{y + height * 0.66:.1f}" class="inside">{name}</text>'
            yield (
                f"<g><title>{name}: {text}</title>"
                f'<rect x="{x:.1f}" y="{y}" width="{max(0.5, width - 1):.1f}" height="{height}" rx="2" '
                f'class="part{colour}"/>{inside if width > 8 * len(name) + 10 else ""}</g>'
            )
        x += width


def _label(text: str, x: float, y: float) -> str:
    return f'<text x="{x}" y="{y:.1f}" class="label end">{text}</text>'


def _svg(height: int, drawn: Iterable[str], title: str) -> str:
    body = "\n".join(drawn)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">\n{body}\n</svg>'
