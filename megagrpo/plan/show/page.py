"""A plan as one web page that needs nothing else: no scripts, no other files; light or dark as the reader's system."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from megagrpo.errors import Problem
from megagrpo.plan.device_map import MappedDevice, axes, ranks_text
from megagrpo.plan.memory import DeviceMemory, PhaseMemory
from megagrpo.plan.parameters import Stage
from megagrpo.plan.plan import Plan
from megagrpo.plan.search import Search
from megagrpo.plan.units import byte_text, second_text, spans
from megagrpo.recipe.load import dump

KINDS_MAX = 12
PALETTE = (
    "#4e79c4", "#e08a3c", "#58a55c", "#b55d9c", "#3fa7b5", "#c9605b", "#8f75c9", "#b59b3a", "#6b8e9e", "#d07a9a",
    "#7aa344", "#a0785a", "#5b6ab0", "#c77f6e", "#4f9e86", "#9a9a52",
)  # fmt: skip
PARTS = len(PALETTE)
STYLE = Path(__file__).with_name("page.css")
WIDTH, LABEL, BAR_LABEL, BAR_HEIGHT = 960, 46, 110, 18


def page(plan: Plan, search: Search | None = None) -> str:
    """The whole page, in HTML."""
    sections = [
        _problems("This cannot run", "bad", plan.problems),
        _problems("Unwise", "unwise", plan.unwise),
        _where(plan),
        *_memory(plan),
        *_time(plan),
        *(_search(search) if search else ()),
        *_assumptions(plan),
        _summary(plan),
    ]
    parts = "".join(
        f".part{index} {{ fill: {colour}; background: {colour}; }}\n" for index, colour in enumerate(PALETTE)
    )
    title = escape(plan.recipe.name)
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Plan of {title}</title>
<style>{STYLE.read_text(encoding="utf-8")}{parts}</style></head>
<body><main>
<h1>{title}</h1>
<div class="soft">{escape(plan.summary["model"])}</div>
{_chips(plan)}
{"".join(sections)}
</main></body></html>
"""


# --- sections --------------------------------------------------------------------------------------------------------


def _chips(plan: Plan) -> str:
    """The figures to read first."""
    noun = "GPUs" if plan.device == "cuda" else "processes"
    card = f"of {byte_text(plan.card_bytes)} at most in use" if plan.card_bytes else "on the fullest"
    chips = [
        (str(len(plan.device_map)), f"{plan.machines.gpu.name} {noun}" if plan.machines else noun),
        (byte_text(plan.fullest_first[0].fullest.bytes), card),
    ]
    if plan.estimate:
        time = plan.estimate.time
        chips.append((second_text(time.seconds), "a step"))
        chips.append((f"{time.tokens_per_second_per_gpu:,.0f}", f"tokens/s/{plan.noun}"))
        if time.days is not None:
            chips.append((second_text(time.days * 86400), f"{time.steps} steps"))
    shown = (f"<div class=chip><b>{number}</b><span>{escape(text)}</span></div>" for number, text in chips)
    return f"<div class=chips>{''.join(shown)}</div>"


def _where(plan: Plan) -> str:
    legend = [
        (f'style="background:{stage_colour(i, len(plan.stages))}"', f"stage {i}: {stage.text}")
        for i, stage in enumerate(plan.stages)
    ]
    if any(mapped.rank is None for mapped in plan.device_map):
        legend.append(('style="background:#8b949e"', "engines only"))
    lines = [
        [
            ("", axis.name),
            ("number", str(axis.size)),
            ("number", str(axis.stride)),
            ("", ranks_text(axis.example)),
            ("number", str(axis.nodes)),
        ]
        for axis in axes(plan.recipe, plan.architecture)
    ]
    heads = ("axis", "ranks", "apart", "first group", "nodes")
    groups = f"<h3>Groups</h3>{_table(heads, lines)}" if lines else ""
    square = "Each row is a node and each square one GPU" if plan.device == "cuda" else "Each square is a process"
    note = f"{square}. A dot marks the first device of an engine, a bar its other devices."
    grid = device_grid(plan.device_map, plan.stages, plan.recipe.cluster.gpus_per_node)
    return _section("Where", f'{grid}{_legend(legend)}<p class="soft">{note}</p>{groups}')


def _memory(plan: Plan) -> Iterator[str]:
    if not plan.memory:
        return
    kinds = plan.fullest_first
    names = dict.fromkeys(part.name for kind in plan.memory for phase in kind.phases for part in phase.parts)
    colours = {name: index % PARTS for index, name in enumerate(names)}
    scale = max(plan.card_bytes or 0, kinds[0].fullest.bytes)
    bars = "".join(
        f"<h3>{escape(_kind(kind))}</h3>{memory_bars(kind.phases, colours, plan.card_bytes, scale)}"
        for kind in kinds[:KINDS_MAX]
    )
    legend = _legend((f'class="part{colour}"', name) for name, colour in colours.items())
    lines = [
        [("name", part.name), ("number", byte_text(part.bytes)), ("code", ", ".join(part.lowered_by))]
        for part in kinds[0].fullest.largest
    ]
    largest = f"<h3>{escape(kinds[0].name)} in {kinds[0].fullest.phase}, the fullest</h3>"
    table = _table(("item", "bytes", "lowered by"), lines)
    yield _section(f"Memory of each {plan.noun}", f"{bars}{legend}{largest}{table}")


def _kind(kind: DeviceMemory) -> str:
    return f"{kind.name}: {len(kind.devices)} of them, {spans(kind.devices)[:80]}"


def _time(plan: Plan) -> Iterator[str]:
    if plan.estimate is None:
        return
    time = plan.estimate.time
    bar = time_bar([(p.phase, p.seconds, second_text(p.seconds), index) for index, p in enumerate(time.phases)])
    lines = [
        [
            (f"part part{index % PARTS}", phase.phase),
            ("number", second_text(phase.seconds)),
            ("number", f"{phase.seconds / time.seconds:.0%}"),
            ("", ", ".join(f"{name} {second_text(seconds)}" for name, seconds in phase.largest)),
        ]
        for index, phase in enumerate(time.phases)
    ]
    table = _table(("phase", "seconds", "share", "of which"), lines)
    yield _section(f"A step: {second_text(time.seconds)}", f"{bar}{table}")


def _search(search: Search) -> Iterator[str]:
    lines = "".join(
        f"<tr><td class=number>{second_text(choice.estimate.time.seconds)}</td>"
        f"<td><code>{escape(' '.join(choice.overrides)) or 'the recipe as it is'}</code><br>"
        f"{escape(choice.reason)}</td></tr>"
        for choice in search.choices
    )
    head = "<tr><th>a step</th><th>overrides</th></tr>"
    yield _section(
        f"Fastest of {search.legal} legal layouts for {search.gpus} GPUs",
        f"<table>{head}{lines}</table>" if lines else "<p>Nothing fits.</p>",
    )


def _assumptions(plan: Plan) -> Iterator[str]:
    if plan.estimate is None:
        return
    lines = [
        [
            ("", assumed.name),
            ("number", "follows" if assumed.value is None else f"{assumed.value:g}"),
            ("", assumed.unit),
            ("bold", "" if assumed.origin == "default" else assumed.origin),
        ]
        for assumed in plan.assumed
    ]
    half = -(-len(lines) // 2)
    yield _section("Assumptions", f"<div class=columns>{_table((), lines[:half])}{_table((), lines[half:])}</div>")


def _problems(title: str, kind: str, problems: Sequence[Problem]) -> str:
    shown = []
    for problem in problems:
        facts = {"given": problem.given, "needed": problem.needed, "fix": problem.fix}
        shown.append(f"<h3>{escape(problem.where)}</h3>{_facts((name, text) for name, text in facts.items() if text)}")
    return _section(title, "".join(shown), kind) if shown else ""


def _summary(plan: Plan) -> str:
    told = (*plan.summary.items(), *(("not checked", text) for text in plan.unchecked))
    recipe = f"<summary>The recipe, with every default</summary><pre>{escape(dump(plan.recipe))}</pre>"
    return _section("The recipe", f"{_facts(told)}<br><details>{recipe}</details>")


# --- elements --------------------------------------------------------------------------------------------------------


def _section(title: str, body: str, kind: str = "") -> str:
    return f'<section class="{kind}"><h2>{escape(title)}</h2>\n{body}</section>\n'


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    lines = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in facts)
    return f"<dl>{lines}</dl>"


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    """Pairs of a square's attributes and what it stands for."""
    shown = "".join(f"<span><i {attributes}></i>{escape(text)}</span>" for attributes, text in entries)
    return f"<div class=legend>{shown}</div>"


def _table(heads: Sequence[str], lines: Iterable[Sequence[tuple[str, str]]]) -> str:
    """Lines of cells, each a kind and a text: number, name, code, bold, or the class of a coloured square before it."""
    head = f"<tr>{''.join(f'<th>{text}</th>' for text in heads)}</tr>" if heads else ""
    shown = "".join(f"<tr>{''.join(_cell(kind, text) for kind, text in line)}</tr>" for line in lines)
    return f"<table>{head}{shown}</table>"


def _cell(kind: str, text: str) -> str:
    shown = escape(text)
    if kind.startswith("part"):
        square = f'<span class="legend" style="margin:0"><span><i class="{kind}"></i>{shown}</span></span>'
        return f"<td class=name>{square}</td>"
    wrapped = {"code": f"<code>{shown}</code>", "bold": f"<b>{shown}</b>" if shown else ""}.get(kind, shown)
    return f"<td class={kind}>{wrapped}</td>" if kind in ("number", "name") else f"<td>{wrapped}</td>"


# --- pictures --------------------------------------------------------------------------------------------------------


def stage_colour(stage: int, stages: int) -> str:
    """Neighbouring stages differ in hue, far ones go around the circle. Readable on white and on black."""
    hue = (210 + 360 * stage / max(stages, 2)) % 360
    return f"hsl({hue:.0f} 45% {52 if stage % 2 else 60}%)"


def device_grid(devices: Sequence[MappedDevice], stages: Sequence[Stage], per_node: int) -> str:
    """One square for each device, a node to a line."""
    nodes = [list(group) for _, group in groupby(devices, lambda mapped: mapped.node)]
    cell = 26 if len(nodes) <= 16 else 14
    step, across = cell + 3, min(per_node, len(devices))
    block = LABEL + across * step + 14
    columns = max(1, min(WIDTH // block, len(nodes)))
    lines = -(-len(nodes) // columns)
    drawn = []
    for index, node in enumerate(nodes):
        left, top = index // lines * block, index % lines * step
        drawn.append(_label(str(node[0].node), left + LABEL - 8, top + cell * 0.72))
        drawn += [_square(mapped, stages, left + LABEL + mapped.gpu * step, top, cell) for mapped in node]
    return _svg(lines * step, drawn, "devices: a line for each node, a square for each GPU")


def _square(mapped: MappedDevice, stages: Sequence[Stage], x: int, y: int, cell: int) -> str:
    fill = f'fill="{stage_colour(mapped.stage, len(stages))}"' if mapped.rank else 'class="engines-only"'
    shapes = f'<rect x="{x}" y="{y}" width="{cell}" height="{cell}" rx="3" {fill}/>'
    if mapped.engines and mapped.engine_rank == 0:
        shapes += f'<circle cx="{x + cell / 2}" cy="{y + cell - 5}" r="2.6" class="engine"/>'
    elif mapped.engines:
        shapes += f'<rect x="{x}" y="{y + cell - 6}" width="{cell}" height="2" class="engine"/>'
    return f"<g><title>{escape(_told(mapped, stages))}</title>{shapes}</g>"


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
    """A bar for each phase, cut into its parts; a line marks the card's memory."""
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


def time_bar(parts: Sequence[tuple[str, float, str, int]]) -> str:
    """One bar of a whole step. Parts: name, size, text, colour."""
    total = sum(size for _, size, _, _ in parts) or 1.0
    return _svg(36, _stacked(parts, 4, WIDTH / total, left=0, height=28), "seconds of a step by phase")


def _stacked(
    parts: Iterable[tuple[str, float, str, int]], y: int, unit: float, left: int = BAR_LABEL, height: int = BAR_HEIGHT
) -> Iterator[str]:
    x = float(left)
    for name, size, text, colour in parts:
        width = size * unit
        if width > 0.2:
            inside = f'<text x="{x + 6:.1f}" y="{y + height * 0.66:.1f}" class="inside">{escape(name)}</text>'
            yield (
                f"<g><title>{escape(name)}: {text}</title>"
                f'<rect x="{x:.1f}" y="{y}" width="{max(0.5, width - 1):.1f}" height="{height}" rx="2" '
                f'class="part{colour % PARTS}"/>{inside if width > 8 * len(name) + 10 else ""}</g>'
            )
        x += width


def _label(text: str, x: float, y: float) -> str:
    return f'<text x="{x}" y="{y:.1f}" class="label end">{escape(text)}</text>'


def _svg(height: int, drawn: Iterable[str], title: str) -> str:
    body = "\n".join(drawn)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">\n{body}\n</svg>'
