"""The pictures of a plan's page as SVG: devices coloured by pipeline stage, and bars cut into parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from megagrpo.plan.device_map import MappedDevice, Stage
from megagrpo.plan.memory.parts import PhaseMemory
from megagrpo.plan.units import byte_text

WIDTH = 960
LABEL = 46
BAR_LABEL = 110
BAR_HEIGHT = 18
PARTS = 16  # colours of parts in the style, .part0 and so on


def stage_colour(stage: int, stages: int) -> str:
    """Neighbouring stages differ in hue, far ones go around the circle. Readable on white and on black."""
    hue = (210 + 360 * stage / max(stages, 2)) % 360
    return f"hsl({hue:.0f} 45% {52 if stage % 2 else 60}%)"


def device_grid(devices: Sequence[MappedDevice], stages: Sequence[Stage], per_node: int) -> str:
    """One square for each device, a node to a line. A dot marks where an engine begins; its other GPUs have a bar."""
    nodes = [list(group) for _, group in groupby(devices, lambda mapped: mapped.node)]
    cell = 26 if len(nodes) <= 16 else 14
    step, across = cell + 3, min(per_node, len(devices))
    block = LABEL + across * step + 14
    columns = max(1, min(WIDTH // block, len(nodes)))
    lines = -(-len(nodes) // columns)
    drawn = []
    for index, node in enumerate(nodes):
        left, top = index // lines * block, index % lines * step
        drawn.append(
            f'<text x="{left + LABEL - 8}" y="{top + cell * 0.72:.1f}" class="label end">{node[0].node}</text>'
        )
        drawn += [_square(mapped, stages, left + LABEL + mapped.gpu * step, top, cell) for mapped in node]
    return _svg(WIDTH, lines * step, drawn, "devices: a line for each node, a square for each GPU")


def _square(mapped: MappedDevice, stages: Sequence[Stage], x: float, y: float, cell: int) -> str:
    fill = f'fill="{stage_colour(mapped.stage, len(stages))}"' if mapped.rank else 'class="engines-only"'
    shapes = [f'<rect x="{x}" y="{y}" width="{cell}" height="{cell}" rx="3" {fill}/>']
    if mapped.engines and mapped.engine_rank == 0:
        shapes.append(f'<circle cx="{x + cell / 2}" cy="{y + cell - 5}" r="2.6" class="engine"/>')
    elif mapped.engines:
        shapes.append(f'<rect x="{x}" y="{y + cell - 6}" width="{cell}" height="2" class="engine"/>')
    return f"<g><title>{escape(_told(mapped, stages))}</title>{''.join(shapes)}</g>"


def _told(mapped: MappedDevice, stages: Sequence[Stage]) -> str:
    lines = [f"node {mapped.node}, GPU {mapped.gpu}"]
    if mapped.rank:
        rank = mapped.rank
        lines.append(f"rank {rank.rank}: tensor {rank.tensor}, context {rank.context}, data {rank.data}")
        lines.append(f"pipeline stage {rank.pipeline}: {stages[rank.pipeline].text}")
        lines.append(f"expert {rank.expert}, expert_tensor {rank.expert_tensor}, expert_data {rank.expert_data}")
    if mapped.engines:
        lines.append(f"engine {', '.join(map(str, mapped.engines))}, its tensor rank {mapped.engine_rank}")
    return "\n".join(lines)


def memory_bars(phases: Iterable[PhaseMemory], colours: dict[str, int], card: int | None, scale: int) -> str:
    """A bar for each phase, cut into its parts; a line marks the card's memory."""
    drawn, y = [], 4
    room = WIDTH - BAR_LABEL - 230
    for phase in phases:
        parts = [(part.name, part.bytes, byte_text(part.bytes), colours[part.name]) for part in phase.parts]
        drawn.append(_label(phase.phase, y))
        drawn += _stacked(parts, y, room / scale)
        over = card is not None and phase.bytes > card
        share = f" · {phase.bytes / card:.0%}" if card else ""
        text = f"{byte_text(phase.bytes)}{share}" + (" · too much" if over else "")
        x = BAR_LABEL + max(phase.bytes, card or 0) * room / scale + 10
        drawn.append(f'<text x="{x:.1f}" y="{y + 13}" class="label{" over" if over else ""}">{text}</text>')
        y += BAR_HEIGHT + 8
    if card is not None:
        x = BAR_LABEL + card * room / scale
        drawn.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{y - 4}" class="card"/>')
    return _svg(WIDTH, y, drawn, "memory by phase")


def time_bar(parts: Sequence[tuple[str, float, str, int]]) -> str:
    """One bar of a whole step. Parts: name, size, text, colour."""
    total = sum(size for _, size, _, _ in parts) or 1.0
    return _svg(WIDTH, 36, _stacked(parts, 4, WIDTH / total, left=0, height=28), "seconds of a step by phase")


def _stacked(
    parts: Iterable[tuple[str, float, str, int]], y: int, unit: float, left: int = BAR_LABEL, height: int = BAR_HEIGHT
) -> list[str]:
    drawn, x = [], float(left)
    for name, size, text, colour in parts:
        width = size * unit
        if width > 0.2:
            inside = f'<text x="{x + 6:.1f}" y="{y + height * 0.66:.1f}" class="inside">{escape(name)}</text>'
            drawn.append(
                f"<g><title>{escape(name)}: {text}</title>"
                f'<rect x="{x:.1f}" y="{y}" width="{max(0.5, width - 1):.1f}" height="{height}" rx="2" '
                f'class="part{colour % PARTS}"/>{inside if width > 8 * len(name) + 10 else ""}</g>'
            )
        x += width
    return drawn


def _label(text: str, y: int) -> str:
    return f'<text x="{BAR_LABEL - 10}" y="{y + 13}" class="label end">{escape(text)}</text>'


def _svg(width: int, height: int, drawn: Iterable[str], title: str) -> str:
    body = "\n".join(drawn)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">\n{body}\n</svg>'
