"""The table of all metrics, and their last values for Prometheus.

metrics.yaml is read once it is needed; tools/metric_docs.py makes docs/metrics.md from it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from megagrpo.errors import MachineError, Problem
from megagrpo.section import table_beside

if TYPE_CHECKING:
    from prometheus_client import Gauge

HOST, PREFIX = "127.0.0.1", "megagrpo_"
STEP, TIME = f"{PREFIX}step", f"{PREFIX}step_timestamp_seconds"


class UndocumentedMetric(UserWarning):
    """A metric that is not in the table was logged. Tests turn this warning into an error."""


@dataclass(frozen=True)
class Metric:
    """One metric. A {placeholder} in the name stands for any text."""

    name: str
    unit: str
    meaning: str


@cache
def documented() -> tuple[Metric, ...]:
    """Reads the table."""
    return tuple(Metric(*row) for row in table_beside(__file__, "metrics.yaml"))


def undocumented(names: Iterable[str]) -> list[str]:
    """Returns the names that are not in the table."""
    return [name for name in names if metric_of(name) is None]


@cache
def metric_of(name: str) -> Metric | None:
    """Returns the table's entry for a name: the one of that name, or else the one with the longest pattern for it."""
    known = [metric for metric, pattern in _patterns() if pattern.fullmatch(name)]
    return max(known, key=lambda metric: (metric.name == name, len(metric.name)), default=None)


@cache
def described(name: str) -> str:
    """Returns meaning and unit of a metric; empty if it is not in the table."""
    if (metric := metric_of(name)) is None:
        return ""
    return f"{metric.meaning} [{metric.unit}]" if metric.unit else metric.meaning


@cache
def _patterns() -> list[tuple[Metric, re.Pattern[str]]]:
    return [(metric, re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(metric.name)))) for metric in documented()]


# --- for Prometheus ------------------------------------------------------------------------------------------------


class PrometheusEndpoint:
    """A gauge for each metric, with the label `run` and the value logged last, on loopback until the run's end.

    Needs megagrpo[prometheus].
    """

    def __init__(self, port: int, name: str) -> None:
        """Starts the server. name: of the run. Raises MachineError if the port is taken."""
        from prometheus_client import CollectorRegistry, start_http_server

        self._name, self._registry = name, CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        try:
            self._server, self._thread = start_http_server(port, HOST, self._registry)
        except OSError as error:
            where, given = "track.prometheus_port", f"{port}: {error.strerror or error}"
            raise MachineError(Problem(where, given, "a free port", "set another, or leave it out")) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._set(prometheus_name(name), described(name), value)
        self._set(STEP, "The last step.", step)
        self._set(TIME, "When it was logged, since 1970, in seconds.", time.time())

    def _set(self, name: str, meaning: str, value: float) -> None:
        from prometheus_client import Gauge

        if name not in self._gauges:
            self._gauges[name] = Gauge(name, meaning, ["run"], registry=self._registry)
        self._gauges[name].labels(self._name).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def prometheus_name(name: str) -> str:
    """Returns the name in Prometheus, reward/mean as megagrpo_reward_mean: letters, digits and underscores."""
    return PREFIX + re.sub(r"[^a-zA-Z0-9]+", "_", name.replace("@", "_at_")).strip("_")
