"""Spans of a step, and the Chrome trace that is made of them."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.timeline import Span, Timeline, write_chrome_trace

WHO = ["driver", "engine 2", "engine 10"]
MOMENTS = st.integers(0, 30).map(float)


def test_nothing_is_kept_unless_someone_records() -> None:
    timeline = Timeline()
    with timeline.span("driver", "step"):
        timeline.begin()
        assert timeline.take() == []
        timeline.begin()
        recording = Thread(target=timeline.record, args=("engine 0", "sample 1", 1.0, 2.0))
        recording.start()
        recording.join()
    step = timeline.take()[1]
    assert (step.who, step.what, step.end >= step.begin) == ("driver", "step", True)
    timeline.record("driver", "later", 1.0, 2.0)
    assert timeline.take() == []


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "trace.json"


@given(st.lists(st.tuples(st.sampled_from(WHO), MOMENTS, MOMENTS)))
def test_spans_of_a_row_lie_in_each_other_or_apart(path: Path, named: list[tuple[str, float, float]]) -> None:
    spans = [Span(who, f"{n}", min(a, b), max(a, b)) for n, (who, a, b) in enumerate(named)]
    write_chrome_trace(path, spans, began=-1.0)
    events = json.loads(path.read_text())["traceEvents"]
    drawn = [event for event in events if event["ph"] == "X"]
    assert sorted(int(event["name"]) for event in drawn) == list(range(len(spans)))
    assert all(event["ts"] >= 1e6 and event["dur"] >= 0 for event in drawn)
    for one in drawn:
        for other in drawn:
            if (one["pid"], one["tid"]) == (other["pid"], other["tid"]):
                a, b = (one["ts"], one["ts"] + one["dur"]), (other["ts"], other["ts"] + other["dur"])
                apart = a[1] <= b[0] or b[1] <= a[0]
                assert apart or (a[0] <= b[0] and b[1] <= a[1]) or (b[0] <= a[0] and a[1] <= b[1])
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [names[pid] for pid in sorted(names)] == sorted(names.values(), key=WHO.index)
