"""The last step's metrics for Prometheus, on loopback. Needs megagrpo[prometheus]."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from megagrpo.errors import MachineError, Problem
from megagrpo.track.metrics import described

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

HOST, PREFIX = "127.0.0.1", "megagrpo_"
STEP, TIME = f"{PREFIX}step", f"{PREFIX}step_timestamp_seconds"


class PrometheusEndpoint:
    """A gauge for each metric, with the label `run` and the value logged last, served until the run's end."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._gauges: Mapping[str, tuple[str, float]] = {}

    def start(self, name: str) -> None:
        """Starts the server. name: of the run. Raises MachineError if the port is taken."""
        from prometheus_client import CollectorRegistry, start_http_server

        self._name = name
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(self._port, HOST, registry)
        except OSError as error:
            where, given = "track.prometheus_port", f"{self._port}: {error.strerror or error}"
            raise MachineError(Problem(where, given, "a free port", "set another, or leave it out")) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        gauges = dict(self._gauges)
        gauges |= {prometheus_name(name): (name, float(value)) for name, value in metrics.items()}
        self._gauges = gauges | {STEP: ("", float(step)), TIME: ("", time.time())}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yields the gauges, for prometheus_client, in the threads of its server."""
        from prometheus_client.core import GaugeMetricFamily

        for name, (logged, value) in self._gauges.items():
            help_text = {STEP: "The last step.", TIME: "When it was logged, since 1970, in seconds."}.get(name)
            gauge = GaugeMetricFamily(name, help_text or described(logged), labels=["run"])
            gauge.add_metric([self._name], value)
            yield gauge

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def prometheus_name(name: str) -> str:
    """Returns the name in Prometheus, reward/mean as megagrpo_reward_mean: letters, digits and underscores."""
    return PREFIX + re.sub(r"[^a-zA-Z0-9]+", "_", name.replace("@", "_at_")).strip("_")
