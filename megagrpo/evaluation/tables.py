"""Metrics of evaluations, and of comparisons, as tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.table import Table

from megagrpo.evaluation.comparison import Difference
from megagrpo.recipe.schema.eval import EvalSet, evaluation_metric_names


def metrics_table(held_out: EvalSet, prompts: int, sources: Sequence[str], metrics: Mapping[str, float]) -> Table:
    """Draws one set: a row for each metric with its interval, a column for each data source if there are several."""
    each = f"{prompts} prompts x {held_out.samples_per_prompt}"
    shown = sources if len(sources) > 1 else ()
    table = Table("metric", "mean", "95 % interval", *shown, title=f"{held_out.name}: {each}", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    parts = [name for name in metrics if name.startswith("reward/") and name != "reward/errors"]
    for name in (*evaluation_metric_names(held_out.samples_per_prompt), *parts):
        interval = ""
        if f"{name}/low" in metrics:
            interval = f"{_number(metrics[f'{name}/low'])} to {_number(metrics[f'{name}/high'])}"
        of_sources = (_number(metrics.get(f"{source}/{name}", math.nan)) for source in shown)
        table.add_row(name, _number(metrics[name]), interval, *of_sources)
    for name in (
        "unscored_share",
        "reward/errors",
        "masked",
        "response_tokens/mean",
        "response_tokens/truncated_share",
    ):
        table.add_row(name, f"{metrics[name]:.4g}", "", *("" for _ in shown))
    return table


def comparison_table(held_out: str, differences: Sequence[Difference]) -> Table:
    """Draws one set: a row for each metric of two models."""
    headings = ("metric", "first", "second", "difference", "95 % interval", "p", "test")
    prompts = max((one.prompts for one in differences), default=0)
    table = Table(*headings, title=f"{held_out}: the same {prompts} prompts", title_justify="left")
    for column in table.columns[1:6]:
        column.justify = "right"
    for one in differences:
        interval = f"{one.low:+.3f} to {one.high:+.3f}"
        table.add_row(
            one.metric,
            _number(one.first),
            _number(one.second),
            f"{one.difference:+.3f}",
            interval,
            f"{one.p_value:.2g}",
            one.test,
        )
    return table


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"
