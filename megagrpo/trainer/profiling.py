"""Profiles of the steps in train.profile: a timeline of the driver and all it waits for, and the ranks' operations.

profile/step_000005/ in the run's directory
  timeline.json               driver, engines, reward workers and training ranks, as the driver sees them
  rank_0.trace.json.gz        operations and kernels of a training rank, by torch's profiler
  rank_0.memory.pickle        its CUDA memory
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megagrpo.cluster.train_ranks import TrainRanks
from megagrpo.recipe.defaults import run_directory
from megagrpo.recipe.schema import AnyRecipe
from megagrpo.timeline import TIMELINE, write_chrome_trace


@contextmanager
def profiled(recipe: AnyRecipe, ranks: TrainRanks, step: int, say: Callable[[str], None]) -> Iterator[None]:
    """Records `step`, taken inside the context, if the recipe names it. The run continues if a profile cannot be
    written; a step that raises has none."""
    settings = recipe.train.profile
    if settings is None or step not in settings.steps:
        yield
        return
    directory = run_directory(recipe).absolute() / "profile" / f"step_{step:06d}"
    ranks.begin_profile(settings.ranks, settings.memory)
    began = time.monotonic()
    TIMELINE.begin()
    try:
        yield
    finally:
        spans = TIMELINE.take()
    problems = ranks.end_profile(settings.ranks, directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_chrome_trace(directory / "timeline.json", spans, began)
    except OSError as error:
        problems.append(str(error))
    for problem in problems:
        say(f"warning: the profile of step {step} is not whole: {problem}")
    say(f"profile of step {step}: open the files of {directory} at https://ui.perfetto.dev (docs/profiling.md)")
