"""The Grafana dashboard of a run's gauges: `python -m tools.grafana > grafana/megagrpo.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from megagrpo.track.metrics import STEP, described, prometheus_name

NAME = "{{__name__}}"
"""Grafana's placeholder for the name of a curve's gauge."""
ACROSS, WIDTH, HEIGHT = 3, 8, 8
"""Panels in a row, and the size of each in Grafana's grid of 24 columns."""


@dataclass(frozen=True)
class Panel:
    """Curves of metrics, named as in track/metrics.yaml: {set} stands for any text, {k} for a number."""

    title: str
    metrics: tuple[str, ...]
    unit: str = "short"
    stacked: bool = False


PANELS = (
    Panel("Reward", ("reward/mean", "reward/solved_share")),
    Panel("Held-out scores", ("eval/{set}/mean@{k}", "eval/{set}/pass@{k}")),
    Panel("Alerts", ("alerts",)),
    Panel("Gradient norm", ("grad_norm",)),
    Panel("KL to the reference", ("kl/mean",)),
    Panel("Entropy", ("entropy",)),
    Panel("Response length", ("response_tokens/mean", "response_tokens/max")),
    Panel("Responses cut off", ("response_tokens/truncated_share",), "percentunit"),
    Panel("Groups with signal", ("groups/with_signal_share",), "percentunit"),
    Panel("Trainer and engines differ", ("logprob_difference/mean", "logprob_difference/max")),
    Panel("Staleness", ("staleness/mean", "staleness/max")),
    Panel("Errors of rewards", ("reward/errors", "skipped_steps")),
    Panel(
        "Seconds of a step",
        ("seconds/rollout", "seconds/reward", "seconds/logprobs", "seconds/update", "seconds/weight_sync"),
        "s",
        stacked=True,
    ),
    Panel("Idle", ("trainer/idle_share", "engines/idle_share"), "percentunit"),
    Panel("Tokens per second", ("tokens_per_second",)),
)
RAY_PANELS = (
    Panel("Processors of each node", ("ray_node_cpu_utilization",), "percent"),
    Panel("Memory of each node", ("ray_node_mem_used",), "bytes"),
    Panel("GPUs of each node", ("ray_node_gpus_utilization",), "percent"),
)
"""Ray's own gauges, by their names in Prometheus."""


def dashboard() -> dict[str, Any]:
    """Returns the dashboard that Grafana imports, with a choice of Prometheus data source and of runs."""
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "title": "megagrpo",
        "uid": "megagrpo",
        "tags": ["megagrpo"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
                {
                    "name": "run",
                    "type": "query",
                    "datasource": source,
                    "query": {"query": f"label_values({STEP}, run)", "refId": "run"},
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                },
            ]
        },
        "panels": [_panel(number, panel, source) for number, panel in enumerate(PANELS + RAY_PANELS)],
    }


def _panel(number: int, panel: Panel, source: dict[str, str]) -> dict[str, Any]:
    row, column = divmod(number, ACROSS)
    shown = {"lineWidth": 2, "fillOpacity": 40 if panel.stacked else 0}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": "\n\n".join(f"{name}: {described(name)}" for name in panel.metrics if described(name)),
        "datasource": source,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "custom": shown | {"stacking": {"mode": "normal" if panel.stacked else "none"}},
            },
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": source,
                "expr": name if panel in RAY_PANELS else query(name),
                "legendFormat": "{{instance}}"
                if panel in RAY_PANELS
                else f"{{{{run}}}} {NAME if '{' in name else name}",
            }
            for index, name in enumerate(panel.metrics)
        ],
    }


def query(name: str) -> str:
    """Returns the PromQL for a metric of the chosen runs."""
    if "{" not in name:
        return f'{prometheus_name(name)}{{run=~"$run"}}'
    marked = prometheus_name(name.replace("{k}", "0k0").replace("{set}", "0any0"))
    pattern = marked.replace("0k0", "[0-9]+").replace("0any0", ".+")
    return f'{{__name__=~"{pattern}", run=~"$run"}}'


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
