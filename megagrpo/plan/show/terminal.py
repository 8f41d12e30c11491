"""A plan on the terminal: where everything lies, what fills the memory, what a step takes, and what was assumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from megagrpo.plan.device_map import MappedDevice, Stage, axes, rows, spans
from megagrpo.plan.memory.parts import DeviceMemory, PhaseMemory
from megagrpo.plan.plan import Assumed, Plan
from megagrpo.plan.search.search import SPARE, Choice, Search
from megagrpo.plan.time.seconds import PhaseTime
from megagrpo.plan.units import byte_text, second_text

WIDTH_MAX = 120
KINDS_MAX = 4
FIELDS_MAX = 3
PARTS_MAX = 8
TIME_PARTS_MAX = 4
COLOURS = ("blue", "green", "magenta", "cyan", "yellow", "bright_blue", "bright_green", "bright_magenta")
NAMES = {"cuda": ("node", "GPU"), "cpu": ("", "process")}


def draw(plan: Plan, search: Search | None, console: Console) -> None:
    """Print all of a plan. Plain text where the console is no terminal; pictures are never wider than it."""
    console.width = min(console.width, WIDTH_MAX)
    marks = _Marks(console)
    for name, text in (*plan.summary, *(("not checked", text) for text in plan.unchecked)):
        _print(console, Text(f"{name:<12} {text}"))
    for section in (_layout(plan), _memory(plan, marks), _time(plan, marks), _assumptions(plan)):
        if section is not None:
            console.print()
            console.print(section)
    if search is not None:
        console.print()
        for line in _search(search):
            _print(console, line)
    if plan.unwise:
        console.print()
    for problem in plan.unwise:
        _print(console, Text(f"unwise: {problem}", style="yellow"))


def _print(console: Console, text: Text) -> None:
    """In one piece, so that it can be searched and copied."""
    console.print(text, soft_wrap=True)


class _Marks:
    """Characters of bars: blocks where the console can show them."""

    def __init__(self, console: Console) -> None:
        blocks = console.encoding.startswith("utf")
        self.full, self.free, self.edge = ("█", "·", "│") if blocks else ("#", ".", "|")
        self.width = 30 if console.width >= 76 else 10


def _layout(plan: Plan) -> RenderableType:
    table = _table()
    columns = _columns(plan)
    for title in columns:
        table.add_column(title)
    for row in rows(plan.device_map):
        table.add_row(*(cell(row) for cell in columns.values()))
    lines = [
        Text(
            f"{axis.name} {axis.size}: ranks {_some(axis.example)}"
            + (f", each group over {axis.nodes} nodes" if axis.nodes > 1 else ", each group within a node")
        )
        for axis in axes(plan.recipe, plan.architecture)
        if plan.device == "cuda"
    ]
    return Group(_title("where"), table, *lines)


def _columns(plan: Plan) -> dict[str, Callable[[Sequence[MappedDevice]], str]]:
    """What a row of devices says in each column; a column that would be the same everywhere is left out."""
    layout = plan.recipe.train.layout.parallel()
    node, gpu = NAMES[plan.device]
    columns: dict[str, Callable[[Sequence[MappedDevice]], str]] = {}
    if node:
        columns[node] = lambda row: spans(mapped.node for mapped in row)
    columns[gpu] = lambda row: spans(mapped.gpu if node else mapped.device for mapped in row)
    columns["rank"] = lambda row: spans(mapped.rank.rank for mapped in row if mapped.rank) or "-"
    if layout.pipeline > 1:
        columns["stage"] = lambda row: spans(mapped.stage for mapped in row if mapped.rank) or "-"
    columns["layers"] = lambda row: _held(plan.stages, row)
    shown = {"tensor": layout.tensor, "context": layout.context, "data": layout.data}
    if plan.architecture.experts is not None:
        shown |= {"expert": layout.expert, "expert_tensor": layout.expert_tensor}
    for axis, size in shown.items():
        if size > 1:
            columns[axis] = lambda row, axis=axis: (  # type: ignore[misc]
                spans(getattr(mapped.rank, axis) for mapped in row if mapped.rank) or "-"
            )
    if any(mapped.engines for mapped in plan.device_map):
        columns["engine"] = lambda row: spans(engine for mapped in row for engine in mapped.engines) or "-"
        if any(mapped.engine_rank for mapped in plan.device_map):
            columns["its tensor"] = lambda row: (
                spans(mapped.engine_rank for mapped in row if mapped.engine_rank is not None) or "-"
            )
    return columns


def _held(stages: Sequence[Stage], row: Sequence[MappedDevice]) -> str:
    held = sorted({mapped.stage for mapped in row if mapped.rank})
    if not held:
        return "engines only"
    if len(held) == 1:
        return stages[held[0]].text
    layers = spans(layer for stage in held for chunk in stages[stage].chunks for layer in chunk)
    parts = ["embedding"] * (held[0] == 0), [layers], ["head"] * (held[-1] == len(stages) - 1)
    return ", ".join(part for some in parts for part in some)


def _some(numbers: Sequence[int]) -> str:
    """`0-7`, or `0, 8, 16, ... 120`."""
    if numbers[1] - numbers[0] == 1:
        return f"{numbers[0]}-{numbers[-1]}"
    shown = [str(number) for number in numbers]
    return ", ".join(shown) if len(shown) <= 4 else f"{', '.join(shown[:3])}, ... {shown[-1]}"


def _memory(plan: Plan, marks: _Marks) -> RenderableType | None:
    if not plan.memory:
        return None
    card = plan.machines.gpu.memory_bytes if plan.machines else None
    kinds = sorted(plan.memory, key=lambda kind: kind.fullest.bytes, reverse=True)
    scale = max(card or 0, kinds[0].fullest.bytes)
    name = f"{plan.machines.gpu.name}, {byte_text(card)}" if plan.machines and card else "kind of GPU not given"
    lines: list[RenderableType] = [_title(f"memory of each {'GPU' if plan.device == 'cuda' else 'process'} ({name})")]
    if plan.device == "cpu":
        lines[0] = _title("memory of each process")
    most = kinds[0]
    lines.append(_kind(most, plan))
    colours = _colours(most)
    lines += [_bar_line(phase.phase, phase, card, scale, marks, colours) for phase in most.phases]
    lines.append(_parts(most.fullest, colours, card))
    for kind in kinds[1:KINDS_MAX]:
        lines.append(_kind(kind, plan))
        lines.append(_bar_line(kind.fullest.phase, kind.fullest, card, scale, marks, _colours(kind)))
    if len(kinds) > KINDS_MAX:
        lines.append(
            Text(f"{len(kinds) - KINDS_MAX} more kinds need at most {byte_text(kinds[KINDS_MAX].fullest.bytes)}")
        )
    return Group(*lines)


def _kind(kind: DeviceMemory, plan: Plan) -> Text:
    noun = "GPU" if plan.device == "cuda" else "process"
    many = len(kind.devices) > 1
    plural = {"GPU": "GPUs", "process": "processes"}[noun] if many else noun
    devices = _cut(spans(kind.devices))
    return Text(f"{kind.name}: {plural} {devices}", style="bold")


def _cut(text: str, most: int = 40) -> str:
    return text if len(text) <= most else f"{text[: most - 1].rpartition(',')[0]}, ..."


def _bar_line(
    name: str, phase: PhaseMemory, card: int | None, scale: int, marks: _Marks, colours: dict[str, str]
) -> Text:
    """A phase's bar, cut into its parts; what is beyond the card's memory is marked."""
    line = Text(f"  {name:<12}", no_wrap=True, overflow="crop")
    edge = marks.width if card is None else round(marks.width * card / scale)
    cells = list(_cells(phase, scale, marks.width, colours))
    for colour in cells[:edge]:
        line.append(marks.full, style=colour)
    line.append(marks.free * (edge - len(cells)), style="dim")
    if card is not None:
        line.append(marks.edge)
    line.append(marks.full * len(cells[edge:]), style="bold red")
    if card is not None:
        share = phase.bytes / card
        line.append(f" {byte_text(phase.bytes)}, {share:.0%}")
        if share > 1:
            line.append(f": {byte_text(phase.bytes - card)} too much", style="bold red")
    else:
        line.append(f" {byte_text(phase.bytes)}")
    return line


def _cells(phase: PhaseMemory, scale: int, width: int, colours: dict[str, str]) -> Iterator[str]:
    """Colours of the bar's cells, from the left: each that of the part that the cell's middle lies in."""
    end, at = 0, 0
    for part in phase.parts:
        end += part.bytes
        while at < width and (at + 0.5) * scale / width <= end:
            yield colours[part.name]
            at += 1


def _colours(kind: DeviceMemory) -> dict[str, str]:
    names = dict.fromkeys(part.name for phase in kind.phases for part in phase.parts)
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}


def _parts(phase: PhaseMemory, colours: dict[str, str], card: int | None) -> RenderableType:
    """The largest items of the fullest moment, and what lowers them."""
    table = _table()
    for title in (f"largest in {phase.phase}", "bytes", "lowered by"):
        table.add_column(title, justify="right" if title == "bytes" else "left")
    items = sorted((part for part in phase.parts if part.bytes), key=lambda part: part.bytes, reverse=True)
    for part in items[:PARTS_MAX]:
        name = Text(part.name, style=colours.get(part.name, ""))
        table.add_row(name, byte_text(part.bytes), ", ".join(part.lowered_by[:FIELDS_MAX]))
    if rest := items[PARTS_MAX:]:
        table.add_row(f"{len(rest)} smaller", byte_text(sum(part.bytes for part in rest)), "")
    if card is not None and phase.bytes < card:
        table.add_row(Text("free", style="dim"), byte_text(card - phase.bytes), "")
    return table


def _time(plan: Plan, marks: _Marks) -> RenderableType | None:
    if plan.estimate is None:
        if plan.device == "cpu":
            return None
        return Text("Bars against a card's memory, and seconds: add cluster.gpu=H100 (docs/plan.md lists the GPUs).")
    time = plan.estimate.time
    unit, where = "process", f"{time.gpus} process{'es' if time.gpus > 1 else ''}"
    if plan.machines:
        nodes = -(-time.gpus // plan.machines.gpus_per_node)
        unit, where = "GPU", f"{time.gpus} {plan.machines.gpu.name}" + (f" in {nodes} nodes" if nodes > 1 else "")
    lines: list[RenderableType] = [_title(f"a step: {second_text(time.seconds)} on {where}")]
    lines += [_phase_time(phase, time.seconds, marks) for phase in time.phases]
    rate = f"{time.tokens_per_second_per_gpu:,.0f} tokens/s/{unit}"
    days = "; how long in all: --assume epoch_rows=N, the rows of data.train"
    if time.days is not None:
        days = f"; {time.steps} steps take {second_text(time.days * 86400)}"
    lines.append(Text(rate + days, style="bold"))
    return Group(*lines)


def _phase_time(phase: PhaseTime, whole: float, marks: _Marks) -> RenderableType:
    share = phase.seconds / whole if whole else 0
    filled = round(marks.width * share)
    table = Table.grid(padding=(0, 1))
    table.add_column(width=13)
    table.add_column(width=marks.width, no_wrap=True)
    table.add_column()
    parts = sorted((part for part in phase.parts if part[1] > 0), key=lambda part: part[1], reverse=True)
    shown_parts = parts[:TIME_PARTS_MAX]
    if rest := parts[TIME_PARTS_MAX:]:
        shown_parts.append(("other", sum(seconds for _, seconds in rest)))
    of = ", ".join(f"{name} {second_text(seconds)}" for name, seconds in shown_parts)
    bar = Text(marks.full * filled, style="blue")
    bar.append(marks.free * (marks.width - filled), style="dim")
    shown = f"{second_text(phase.seconds)}, {share:.0%}" + (f": {of}" if len(parts) > 1 else "")
    table.add_row(f"  {phase.phase}", bar, shown)
    return table


def _assumptions(plan: Plan) -> RenderableType | None:
    """Two to a line: they are many. Factors of a calibration only where there was one."""
    if plan.estimate is None:
        return None
    shown = [a for a in plan.assumed if a.value is not None and not (a.name.endswith("_factor") and a.value == 1)]
    half = -(-len(shown) // 2)
    table = Table.grid(padding=(0, 1))
    for _ in range(2):
        table.add_column()
        table.add_column(justify="right")
    for index in range(half):
        pair = shown[index::half]
        table.add_row(*(cell for assumed in pair for cell in _assumed(assumed)))
    origins = sorted({assumed.origin for assumed in shown} - {"default"})
    if origins:
        table.add_row(f"* {' or '.join(origins)}")
    note = Text("--assume NAME=VALUE gives one, --calibrate RUN_DIRECTORY takes them from a run", style="dim")
    return Group(_title("assumptions (units and sources: docs/plan.md)"), table, note)


def _assumed(assumed: Assumed) -> tuple[Text, Text]:
    changed = assumed.origin != "default"
    name, style = f"{assumed.name}{' *' if changed else ''}", "bold" if changed else ""
    return Text(name, style=style), Text(f"{assumed.value:g}", style=style)


def _search(search: Search) -> Iterator[Text]:
    """Ready overrides, and why."""
    counted = f"{search.legal} legal layout{'s' if search.legal != 1 else ''}, {search.estimated} estimates"
    gpus = f"{search.gpus} GPU{'s' if search.gpus > 1 else ''}"
    if not search.choices:
        yield _title(f"nothing fits on {gpus} ({counted})")
        if search.nearest:
            lacking = byte_text(search.nearest.estimate.lacking_bytes)
            yield Text(f"nearest: {lacking} too much on the fullest GPU, {SPARE:.0%} of which are to stay free")
            yield from _choice(search.nearest)
        return
    yield _title(f"fastest on {gpus} ({counted})")
    for number, choice in enumerate(search.choices, start=1):
        time = choice.estimate.time
        yield Text(f"{number}. {second_text(time.seconds)} a step, {time.tokens_per_second_per_gpu:,.0f} tokens/s/GPU")
        yield from _choice(choice)


def _choice(choice: Choice) -> Iterator[Text]:
    yield Text(f"   {' '.join(choice.overrides) or 'the recipe as it is'}", style="bold")
    yield Text(f"   {choice.reason}")


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")


def _title(text: str) -> Text:
    return Text(text, style="bold underline")
