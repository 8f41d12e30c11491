"""A plan on the terminal: the layout, the memory, the time of a step, the schedules and the assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, cycle, groupby

from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from megagrpo.plan.advice import unwise
from megagrpo.plan.assumptions import OF_AGENTS
from megagrpo.plan.case import MappedDevice
from megagrpo.plan.communication import LinkUse
from megagrpo.plan.memory import DeviceMemory, PhaseMemory, host_bytes
from megagrpo.plan.other_models import offloaded_bytes
from megagrpo.plan.parameters import Stage
from megagrpo.plan.plan import Plan
from megagrpo.plan.schedules import ASYNC, ScheduleTime, allowed, best
from megagrpo.plan.search import SPARE, Choice, Search
from megagrpo.plan.time import PhaseTime
from megagrpo.plan.units import byte_text, second_text, spans
from megagrpo.recipe.schema import Recipe
from megagrpo.section import changed

WIDTH_MAX = 120
KINDS_MAX, FIELDS_MAX, PARTS_MAX, TIME_PARTS_MAX = 4, 3, 8, 4
DEVICES_TEXT_MAX, ROWS_MAX = 40, 32
HEADS = ("a step", "speed", "trainer waits", "engines idle", "slots empty", "staleness", "old tokens")
UNKNOWN_GPU = " (kind of GPU not given)"
COLOURS = ("blue", "green", "magenta", "cyan", "yellow", "bright_blue", "bright_green", "bright_magenta")


def draw(plan: Plan, search: Search | None, console: Console) -> None:
    """Prints all of a plan. Prints plain text where the console is no terminal; pictures are never wider than it."""
    console.width = min(console.width, WIDTH_MAX)
    marks = _Marks(console)
    facts = [*plan.summary.items(), *(("not checked", text) for text in plan.unchecked)]
    width = max(12, *(len(name[:30]) for name, _ in facts))
    sections: list[RenderableType | list[Text] | None] = [
        [Text(f"{name:<{width}} {text}") for name, text in facts],
        _proofs(plan),
        *(_layout(plan), _memory(plan, marks), _time(plan, marks), _schedules(plan), _assumptions(plan)),
        _search(search) if search else None,
        [Text(f"unwise: {problem}", style="yellow") for problem in unwise(plan)],
    ]
    for number, section in enumerate(filter(None, sections)):
        if number:
            console.print()
        parts = section if isinstance(section, list) else [section]
        for part in parts:  # sentences are printed in one piece each, so that they can be searched and copied
            console.print(part, soft_wrap=parts is section)


class _Marks:
    """Characters of bars: blocks where the console can show them."""

    def __init__(self, console: Console) -> None:
        blocks = console.encoding.startswith("utf")
        self.full, self.free, self.edge = ("█", "·", "│") if blocks else ("#", ".", "|")
        self.width = 30 if console.width >= 76 else 10


def _proofs(plan: Plan) -> list[Text]:
    """Returns a line for each proof, with its cost; none for fine-tuning."""
    lines = [Text(f"{proof.name:<12} {proof.text}") for proof in plan.proofs]
    return [_title("what is trained is what was sampled"), *lines] if lines else []


# --- where -----------------------------------------------------------------------------------------------------------


def _layout(plan: Plan) -> RenderableType:
    """Returns the devices by row, without columns that would be the same everywhere, and the groups of ranks."""
    layout, devices = plan.recipe.train.layout.parallel(), plan.device_map
    names = ["node", "GPU", "rank"] if plan.device == "cuda" else ["process", "rank"]
    names += ["stage"] * (layout.pipeline > 1) + ["layers"]
    cut = ["tensor", "context", "data", *(["expert", "expert_tensor"] if plan.architecture.experts else [])]
    names += [axis for axis in cut if getattr(layout, axis) > 1]
    names += ["engine"] * any(mapped.engines for mapped in devices)
    names += ["its tensor"] * any(mapped.engine_rank for mapped in devices)
    table = _table(*names)
    for row in rows(devices):
        numbers = list(map(_numbers, row))
        cells = {name: spans(n for columns in numbers for n in columns.get(name, ())) for name in names}
        table.add_row(*((cells | {"layers": _held(plan.stages, row)})[name] or "-" for name in names))
    lines: list[RenderableType] = [_title("where"), table]
    for axis in plan.axes if plan.device == "cuda" else ():
        ranks = f"0-{axis.size - 1}" if axis.stride == 1 else ", ".join(map(str, axis.example))
        if axis.stride > 1 and axis.size > 4:
            ranks = f"{', '.join(map(str, axis.example[:3]))}, ... {axis.example[-1]}"
        nodes = f"over {axis.nodes} nodes" if axis.nodes > 1 else "within a node"
        lines.append(Text(f"{axis.name} {axis.size}: ranks {ranks}, each group {nodes}"))
    return Group(*lines)


def rows(devices: Sequence[MappedDevice]) -> list[tuple[MappedDevice, ...]]:
    """Returns the devices of each table row: one while they are few, else a stage's on a node, else whole stages'."""
    if len(devices) <= ROWS_MAX // 2:
        return [(mapped,) for mapped in devices]
    by_node = [tuple(group) for _, group in groupby(devices, lambda mapped: (mapped.stage, mapped.node))]
    if len(by_node) <= ROWS_MAX // 2:
        return by_node
    by_stage = [tuple(group) for _, group in groupby(devices, lambda mapped: mapped.stage)]
    together = -(-len(by_stage) // ROWS_MAX)
    return [
        tuple(mapped for group in by_stage[first : first + together] for mapped in group)
        for first in range(0, len(by_stage), together)
    ]


def _numbers(mapped: MappedDevice) -> dict[str, Sequence[int]]:
    """Returns a device's numbers by column."""
    rank = {name: (number,) for name, number in vars(mapped.rank).items()} if mapped.rank else {}
    its_tensor = () if mapped.engine_rank is None else (mapped.engine_rank,)
    places = {"process": (mapped.device,), "node": (mapped.node,), "GPU": (mapped.gpu,), "engine": mapped.engines}
    return {**places, **rank, "stage": rank.get("pipeline", ()), "its tensor": its_tensor}


def _held(stages: Sequence[Stage], row: Sequence[MappedDevice]) -> str:
    held = [stages[index] for index in sorted({mapped.stage for mapped in row if mapped.rank})]
    if not held:
        models = dict.fromkeys(mapped.model for mapped in row if mapped.model)
        return ", ".join(models) or "engines only"
    chunks = tuple(chunk for stage in held for chunk in stage.chunks)
    return Stage(chunks, held[0].embedding, held[-1].head).text


# --- memory ----------------------------------------------------------------------------------------------------------


def _memory(plan: Plan, marks: _Marks) -> RenderableType:
    card, kinds = plan.card_bytes, sorted(plan.memory, key=lambda kind: kind.fullest.bytes, reverse=True)
    scale, fullest = max(card or 0, kinds[0].fullest.bytes), kinds[0]
    title, colours = f"memory of each {plan.noun}", _colours(fullest)
    if plan.device == "cuda":
        title += f" ({plan.gpus.gpu.name}, {byte_text(card)})" if plan.gpus and card else UNKNOWN_GPU
    lines: list[RenderableType] = [_title(title), _kind(fullest, plan)]
    lines += [_bar(phase, card, scale, marks, colours) for phase in fullest.phases]
    lines.append(_parts(fullest.fullest, colours, card))
    for kind in kinds[1:KINDS_MAX]:
        lines += [_kind(kind, plan), _bar(kind.fullest, card, scale, marks, _colours(kind))]
    if more := kinds[KINDS_MAX:]:
        lines.append(Text(f"{len(more)} more kinds need at most {byte_text(more[0].fullest.bytes)}"))
    moved = "train.offload, teachers" if offloaded_bytes(plan, 0) else "train.offload"
    uses = {moved: "pinned", "checkpoints": "for copies to save", "exports": "for a copy to write"}
    for (name, use), size in zip(uses.items(), host_bytes(plan), strict=True):
        if size or name == "checkpoints":
            lines.append(Text(f"{name}: {byte_text(size)} of a node's host memory, {use}"))
    return Group(*lines)


def _kind(kind: DeviceMemory, plan: Plan) -> Text:
    nouns = {"GPU": "GPUs", "process": "processes"}[plan.noun] if len(kind.devices) > 1 else plan.noun
    devices = spans(kind.devices)
    if len(devices) > DEVICES_TEXT_MAX:
        devices = f"{devices[: DEVICES_TEXT_MAX - 1].rpartition(',')[0]}, ..."
    return Text(f"{kind.name}: {nouns} {devices}", style="bold")


def _bar(phase: PhaseMemory, card: int | None, scale: int, marks: _Marks, colours: dict[str, str]) -> Text:
    """Draws a phase's bar, and marks what is beyond the card's memory. A cell has the colour of the part at its
    middle."""
    line = Text(f"  {phase.phase:<12}", no_wrap=True, overflow="crop")
    edge = marks.width if card is None else round(marks.width * card / scale)
    cells: list[str] = []
    end = 0
    for part in phase.parts:
        end += part.bytes
        while len(cells) < marks.width and (len(cells) + 0.5) * scale / marks.width <= end:
            cells.append(colours[part.name])
    for colour in cells[:edge]:
        line.append(marks.full, style=colour)
    line.append(marks.free * (edge - len(cells)), style="dim")
    if card is None:
        return line.append(f" {byte_text(phase.bytes)}")
    line.append(marks.edge)
    line.append(marks.full * len(cells[edge:]), style="bold red")
    line.append(f" {byte_text(phase.bytes)}, {phase.bytes / card:.0%}")
    if phase.bytes > card:
        line.append(f": {byte_text(phase.bytes - card)} too much", style="bold red")
    return line


def _colours(kind: DeviceMemory) -> dict[str, str]:
    names = dict.fromkeys(part.name for phase in kind.phases for part in phase.parts)
    return dict(zip(names, cycle(COLOURS), strict=False))


def _parts(phase: PhaseMemory, colours: dict[str, str], card: int | None) -> RenderableType:
    """Returns a table of the largest items of the fullest moment, and the fields that lower them."""
    table = _table(f"largest in {phase.phase}", Column("bytes", justify="right"), "lowered by")
    for part in phase.largest[:PARTS_MAX]:
        name = Text(part.name, style=colours[part.name])
        table.add_row(name, byte_text(part.bytes), ", ".join(part.lowered_by[:FIELDS_MAX]))
    if rest := phase.largest[PARTS_MAX:]:
        table.add_row(f"{len(rest)} smaller", byte_text(sum(part.bytes for part in rest)), "")
    if card is not None and phase.bytes < card:
        table.add_row(Text("free", style="dim"), byte_text(card - phase.bytes), "")
    return table


# --- time ------------------------------------------------------------------------------------------------------------


def _time(plan: Plan, marks: _Marks) -> RenderableType | None:
    if plan.time is None:
        hint = "Bars against a card's memory, and seconds: add cluster.gpu=H100 (docs/plan.md lists the GPUs)."
        return Text(hint) if plan.device == "cuda" else None
    time = plan.time
    where = f"{time.gpus} process{'es' if time.gpus > 1 else ''}"
    if plan.gpus:
        nodes = -(-time.gpus // plan.gpus.gpus_per_node)
        where = f"{time.gpus} {plan.gpus.gpu.name}" + (f" in {nodes} nodes" if nodes > 1 else "")
    seconds = second_text(time.seconds)
    if plan.scheduled is not None:
        seconds += f" under {plan.scheduled.name} ({second_text(time.phase_seconds)} if phases follow one another)"
    days = "; how long in all: --assume epoch_rows=N, the rows of data.train"
    if time.days is not None:
        days = f"; {time.steps} steps take {second_text(time.days * 86400)}"
    return Group(
        _title(f"a step: {seconds} on {where}"),
        *(_phase_time(phase, time.phase_seconds, marks) for phase in time.phases),
        *([_sync(time.sync)] if time.sync else []),
        Text(f"{time.tokens_per_second_per_gpu:,.0f} tokens/s/{plan.noun}{days}", style="bold"),
    )


def _phase_time(phase: PhaseTime, whole: float, marks: _Marks) -> RenderableType:
    share = phase.seconds / whole
    filled = round(marks.width * share)
    parts = phase.largest[:TIME_PARTS_MAX]
    if rest := phase.largest[TIME_PARTS_MAX:]:
        parts.append(("other", sum(seconds for _, seconds in rest)))
    text = f"{second_text(phase.seconds)}, {share:.0%}"
    if len(parts) > 1:
        text += f": {', '.join(f'{name} {second_text(seconds)}' for name, seconds in parts)}"
    table = Table.grid(Column(width=13), Column(width=marks.width, no_wrap=True), "", padding=(0, 1))
    bar = Text(marks.full * filled, style="blue").append(marks.free * (marks.width - filled), style="dim")
    table.add_row(f"  {phase.phase}", bar, text)
    return table


LINK_NAMES = {"network": "network", "node": "within a node", "device": "within a GPU"}


def _sync(links: Sequence[LinkUse]) -> RenderableType:
    """Returns a table of the busiest device's traffic, by kind of link."""
    table = _table("  weight_sync, busiest", "bytes", "seconds", "least bytes", "least seconds", "ratio")
    for use in links:
        least = byte_text(int(use.least_bytes)), second_text(use.least_seconds)
        ratio = f"{use.ratio:.1f}" if use.ratio else "-"
        table.add_row(f"  {LINK_NAMES[use.link]}", byte_text(int(use.bytes)), second_text(use.seconds), *least, ratio)
    return table


def _schedules(plan: Plan) -> RenderableType | None:
    if not plan.schedules:
        return None
    heads = (head if len(head) < 8 else head.replace(" ", "\n") for head in HEADS)
    columns = (Column(head, justify="right", no_wrap=True) for head in heads)
    table = Table(Column(no_wrap=True), *columns, box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for time in plan.schedules:
        table.add_row(time.name, *figures(time, plan.schedules[0]))
    return Group(_title("schedules, simulated"), table, Text(judgement(plan.schedules, plan.grpo)))


def figures(time: ScheduleTime, sync: ScheduleTime) -> tuple[str, ...]:
    """Returns a cell for each of the heads. Speed is a multiple of `sync`'s; staleness is the mean and the most."""
    stale = f"{time.staleness:.1f}, {time.staleness_max}" if time.staleness_max else "0"
    return (
        second_text(time.seconds),
        f"{sync.seconds / time.seconds:.2f}x",
        f"{time.trainer_waits:.0%}",
        f"{time.engines_idle:.0%}",
        f"{time.slots_empty:.0%}",
        stale,
        f"{time.old_tokens:.0%}",
    )


def judgement(times: Sequence[ScheduleTime], recipe: Recipe) -> str:
    """Describes the best schedule, its price, and the recipe's own. sync is the first of `times`."""
    chosen, sync = best(times), times[0]
    if chosen is sync:
        text = "best here: sync, whose samples are never stale"
    else:
        faster = f"{sync.seconds / chosen.seconds:.2f} times as fast as sync"
        late = f"groups are trained {chosen.staleness:.1f} versions late in the mean, {chosen.staleness_max} at most"
        old = f"{chosen.old_tokens:.0%} of their tokens are more than one version old"
        text = f"best here: {chosen.name}, {faster}; its price: {late}, and {old}"
    if recipe.schedule != sync.schedule:
        ours = next(time for time in times if time.schedule == recipe.schedule)
        text += f"; the recipe's is {ours.name}, {sync.seconds / ours.seconds:.2f} times as fast as sync"
    if allowed(changed(recipe, {"cluster.placement": "disaggregated"}), ASYNC) and not allowed(recipe, ASYNC):
        text += "; engines on devices of their own can sample during training, too: --search compares"
    return text


def _assumptions(plan: Plan) -> RenderableType | None:
    """Returns the assumptions, two to a line. Shows factors only of a calibration, and agents' only for agents."""
    if plan.time is None:
        return None
    shown = [a for a in plan.assumed if a.value is not None and not (a.name.endswith("_factor") and a.value == 1)]
    if not (isinstance(plan.recipe, Recipe) and plan.recipe.agent):
        shown = [assumed for assumed in shown if assumed.name not in OF_AGENTS]
    cells = []
    for assumed in shown:
        mark, style = ("", "") if assumed.origin == "default" else (" *", "bold")
        cells.append((Text(f"{assumed.name}{mark}", style=style), Text(f"{assumed.value:g}", style=style)))
    half = -(-len(cells) // 2)
    table = Table.grid("", Column(justify="right"), "", Column(justify="right"), padding=(0, 1))
    for index in range(half):
        table.add_row(*chain.from_iterable(cells[index::half]))
    if origins := sorted({assumed.origin for assumed in shown} - {"default"}):
        table.add_row(f"* {' or '.join(origins)}")
    note = Text("--assume NAME=VALUE gives one, --calibrate RUN_DIRECTORY takes them from a run", style="dim")
    return Group(_title("assumptions (units and sources: docs/plan.md)"), table, note)


# --- search ----------------------------------------------------------------------------------------------------------


def _search(search: Search) -> list[Text]:
    """Returns the lines of the search: ready overrides, and their reasons."""
    counted = f"{search.legal} legal layout{'s' if search.legal != 1 else ''}, {search.estimated} estimates"
    gpus = f"{search.gpus} GPU{'s' if search.gpus > 1 else ''}"
    lines = [_title(f"{'fastest' if search.choices else 'nothing fits'} on {gpus} ({counted})")]
    for number, choice in [*enumerate(search.choices, start=1), *enumerate(search.asynchronous, start=1)]:
        time, schedule = choice.time, choice.schedule
        line = f"{number}. {second_text(time.seconds)} a step, {time.tokens_per_second_per_gpu:,.0f} tokens/s/GPU"
        if schedule is not None:
            if number == 1:
                lines.append(_title(f"fastest if engines on GPUs of their own sample all the time ({schedule.name})"))
            line += f"; the trainer waits {schedule.trainer_waits:.0%}, engines are idle {schedule.engines_idle:.0%}"
        lines += [Text(line), *_choice(choice)]
    if search.nearest:
        lacking = byte_text(search.nearest.lacking_bytes)
        line = f"nearest: {lacking} too much on the fullest GPU, {SPARE:.0%} of which are to stay free"
        lines += [Text(line), *_choice(search.nearest)]
    return lines


def _choice(choice: Choice) -> tuple[Text, Text]:
    overrides = choice.words or "the recipe as it is"
    return Text(f"   {overrides}", style="bold"), Text(f"   {choice.reason}")


def _table(*titles: str | Column) -> Table:
    return Table(*titles, box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")


def _title(text: str) -> Text:
    return Text(text, style="bold underline")
