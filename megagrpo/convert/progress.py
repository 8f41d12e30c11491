"""A bar with bytes, speed and the time left, on a terminal; nothing anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

Advance = Callable[[int], None]
"""Says that so many more bytes are done."""


@contextmanager
def bar(title: str, total_bytes: int, done_bytes: int = 0) -> Iterator[Advance]:
    """Shows how far the block is, on standard error."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total_bytes, completed=done_bytes)
        yield lambda count: progress.advance(task, count)
