"""A plan as one web page that needs nothing else: no scripts, no other files; light or dark as the reader's system."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from megagrpo.errors import Problem
from megagrpo.plan.device_map import axes, spans
from megagrpo.plan.memory.parts import DeviceMemory
from megagrpo.plan.plan import Plan
from megagrpo.plan.search.search import Search
from megagrpo.plan.show.page_svg import PARTS, device_grid, memory_bars, stage_colour, time_bar
from megagrpo.plan.time.seconds import PhaseTime
from megagrpo.plan.units import byte_text, second_text
from megagrpo.recipe.load import dump

KINDS_MAX = 12
PALETTE = (
    "#4e79c4", "#e08a3c", "#58a55c", "#b55d9c", "#3fa7b5", "#c9605b", "#8f75c9", "#b59b3a", "#6b8e9e", "#d07a9a",
    "#7aa344", "#a0785a", "#5b6ab0", "#c77f6e", "#4f9e86", "#9a9a52",
)  # fmt: skip
STYLE = Path(__file__).with_name("page.css")


def page(plan: Plan, search: Search | None = None) -> str:
    """The whole page, in HTML."""
    sections = [
        *_problems("This cannot run", "bad", plan.problems),
        *_problems("Unwise", "unwise", plan.unwise),
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
<div class="soft">{escape(dict(plan.summary)["model"])}</div>
{_chips(plan)}
{"".join(sections)}
</main></body></html>
"""


def _section(title: str, body: str, kind: str = "") -> str:
    return f'<section class="{kind}"><h2>{escape(title)}</h2>\n{body}</section>\n'


def _chips(plan: Plan) -> str:
    noun = "GPUs" if plan.device == "cuda" else "processes"
    fullest = max(kind.fullest.bytes for kind in plan.memory)
    chips = [(str(len(plan.device_map)), f"{plan.machines.gpu.name} {noun}" if plan.machines else noun)]
    card = f"of {byte_text(plan.machines.gpu.memory_bytes)} at most in use" if plan.machines else "on the fullest"
    chips.append((byte_text(fullest), card))
    if plan.estimate:
        time, unit = plan.estimate.time, "GPU" if plan.machines else "process"
        chips.append((second_text(time.seconds), "a step"))
        chips.append((f"{time.tokens_per_second_per_gpu:,.0f}", f"tokens/s/{unit}"))
        if time.days is not None:
            chips.append((second_text(time.days * 86400), f"{time.steps} steps"))
    shown = (f"<div class=chip><b>{number}</b><span>{escape(text)}</span></div>" for number, text in chips)
    return f"<div class=chips>{''.join(shown)}</div>"


def _where(plan: Plan) -> str:
    per_node = plan.recipe.cluster.gpus_per_node
    entries = [
        (stage_colour(index, len(plan.stages)), f"stage {index}: {stage.text}")
        for index, stage in enumerate(plan.stages)
    ]
    legend = "".join(f'<span><i style="background:{colour}"></i>{escape(text)}</span>' for colour, text in entries)
    if any(mapped.rank is None for mapped in plan.device_map):
        legend += '<span><i style="background:#8b949e"></i>engines only</span>'
    lines = "".join(
        f"<tr><td>{axis.name}</td><td class=number>{axis.size}</td><td class=number>{axis.stride}</td>"
        f"<td>{spans(axis.example) if axis.stride == 1 else _first(axis.example)}</td>"
        f"<td class=number>{axis.nodes}</td></tr>"
        for axis in axes(plan.recipe, plan.architecture)
    )
    table = (
        "<h3>Groups</h3><table><tr><th>axis</th><th>ranks</th><th>apart</th><th>first group</th><th>nodes</th></tr>"
        f"{lines}</table>"
        if lines
        else ""
    )
    square = "A line is a node, a square a GPU" if plan.device == "cuda" else "A square is a process"
    note = f'<p class="soft">{square}; a dot where an engine begins, a bar where it goes on.</p>'
    return _section(
        "Where", f"{device_grid(plan.device_map, plan.stages, per_node)}<div class=legend>{legend}</div>{note}{table}"
    )


def _first(example: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in example[:4])
    return shown if len(example) <= 4 else f"{shown}, … {example[-1]}"


def _memory(plan: Plan) -> Iterator[str]:
    if not plan.memory:
        return
    card = plan.machines.gpu.memory_bytes if plan.machines else None
    names = dict.fromkeys(part.name for kind in plan.memory for phase in kind.phases for part in phase.parts)
    colours = {name: index % PARTS for index, name in enumerate(names)}
    kinds = sorted(plan.memory, key=lambda kind: kind.fullest.bytes, reverse=True)
    scale = max(card or 0, kinds[0].fullest.bytes)
    legend = "".join(f'<span><i class="part{colour}"></i>{escape(name)}</span>' for name, colour in colours.items())
    bars = "".join(
        f"<h3>{escape(_kind(kind))}</h3>{memory_bars(kind.phases, colours, card, scale)}" for kind in kinds[:KINDS_MAX]
    )
    title = f"Memory of each {'GPU' if plan.device == 'cuda' else 'process'}"
    yield _section(title, f"{bars}<div class=legend>{legend}</div>{_largest(kinds[0])}")


def _kind(kind: DeviceMemory) -> str:
    return f"{kind.name}: {len(kind.devices)} of them, {spans(kind.devices)[:80]}"


def _largest(kind: DeviceMemory) -> str:
    lines = "".join(
        f"<tr><td class=name>{escape(part.name)}</td><td class=number>{byte_text(part.bytes)}</td>"
        f"<td><code>{escape(', '.join(part.lowered_by))}</code></td></tr>"
        for part in sorted(kind.fullest.parts, key=lambda part: part.bytes, reverse=True)
        if part.bytes
    )
    head = "<tr><th>item</th><th>bytes</th><th>lowered by</th></tr>"
    return f"<h3>{escape(kind.name)} in {kind.fullest.phase}, the fullest</h3><table>{head}{lines}</table>"


def _time(plan: Plan) -> Iterator[str]:
    if plan.estimate is None:
        return
    time = plan.estimate.time
    bar = time_bar([(p.phase, p.seconds, second_text(p.seconds), index) for index, p in enumerate(time.phases)])
    lines = "".join(_phase(phase, time.seconds, index) for index, phase in enumerate(time.phases))
    head = "<tr><th>phase</th><th>seconds</th><th>share</th><th>of which</th></tr>"
    yield _section(f"A step: {second_text(time.seconds)}", f"{bar}<table>{head}{lines}</table>")


def _phase(phase: PhaseTime, whole: float, colour: int) -> str:
    by_size = sorted((part for part in phase.parts if part[1] > 0), key=lambda part: part[1], reverse=True)
    parts = ", ".join(f"{name} {second_text(seconds)}" for name, seconds in by_size)
    return (
        f'<tr><td class=name><span class="legend" style="margin:0"><span><i class="part{colour % PARTS}"></i>'
        f"{escape(phase.phase)}</span></span></td><td class=number>{second_text(phase.seconds)}</td>"
        f"<td class=number>{phase.seconds / whole:.0%}</td><td>{escape(parts)}</td></tr>"
    )


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
        f"<tr><td>{assumed.name}</td><td class=number>{_value(assumed.value)}</td><td>{assumed.unit}</td>"
        f"<td>{'' if assumed.origin == 'default' else f'<b>{assumed.origin}</b>'}</td></tr>"
        for assumed in plan.assumed
    ]
    half = -(-len(lines) // 2)
    tables = "".join(f"<table>{''.join(some)}</table>" for some in (lines[:half], lines[half:]))
    yield _section("Assumptions", f"<div class=columns>{tables}</div>")


def _value(value: float | None) -> str:
    return "follows" if value is None else f"{value:g}"


def _problems(title: str, kind: str, problems: Sequence[Problem]) -> Iterator[str]:
    if problems:
        yield _section(title, "".join(_problem(problem) for problem in problems), kind)


def _problem(problem: Problem) -> str:
    facts: Iterable[tuple[str, str]] = (("given", problem.given), ("needed", problem.needed), ("fix", problem.fix))
    lines = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in facts if text)
    return f"<h3>{escape(problem.where)}</h3><dl>{lines}</dl>"


def _summary(plan: Plan) -> str:
    told = (*plan.summary, *(("not checked", text) for text in plan.unchecked))
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in told)
    recipe = (
        f"<details><summary>The recipe, with every default</summary><pre>{escape(dump(plan.recipe))}</pre></details>"
    )
    return _section("The recipe", f"<dl>{lines}</dl><br>{recipe}")
