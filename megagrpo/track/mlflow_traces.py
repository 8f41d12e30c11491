"""Rollouts as traces of MLflow: a span for the rollout, in it one for each turn, call of a tool and reward function."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megagrpo.track.rollout_files import first_rows

if TYPE_CHECKING:
    from mlflow.entities import Span

TAG_CHARACTERS = 250
PREVIEW_CHARACTERS = 1000
COLUMNS = (
    "step", "data_source", "prompt_id", "sample", "prompt", "messages", "response", "ground_truth", "score", "parts",
    "notes", "error", "masked", "solved", "advantage", "finish", "prompt_tokens", "tokens", "age", "agent",
)  # fmt: skip
Row = Mapping[str, Any]
"""A row of a file of rollouts (track/rollout_files.py)."""


def log_traces(uri: str, experiment_id: str, run_id: str, run: str, path: Path, count: int) -> None:
    """Logs the first `count` rollouts of a step's file. run: the name from which ids of traces and spans are made: a
    repeat changes nothing.

    A trace ends at the file's mtime. Only agents' turns and tools have known times: another trace has no duration, and
    its spans begin and end with it. MLflow's own tracing logs to one server for the whole process, which may be the
    user's; so spans are sent to this server. Raises the errors of mlflow and its store, and OSError.
    """
    from mlflow.entities import AssessmentSource, Feedback, Span, TraceInfo, TraceLocation, TraceState
    from mlflow.store.tracking.rest_store import RestStore
    from mlflow.tracing.client import TracingClient

    client, ended_ns, all_spans = TracingClient(uri), path.stat().st_mtime_ns, list[Span]()
    source = AssessmentSource(source_type="CODE", source_id="megagrpo")
    for row in first_rows(path, count, COLUMNS):
        trace_id = f"tr-{_digest(run, row['step'], row['prompt_id'], row['sample'])[:32]}"
        agent = json.loads(row["agent"]) if row["agent"] else None
        begin_ns = ended_ns - _length_ns(agent)
        spans = list(_spans(trace_id, row, agent, begin_ns))
        root, failed = spans[0], row["error"] or (agent and agent["error"])
        tags = {
            "mlflow.traceName": f"step {row['step']}: {row['prompt_id']}, rollout {row['sample']}",
            **{name: row[name] for name in ("step", "prompt_id", "data_source", "finish", "solved")},
            "rollout": row["sample"],
        }
        info = TraceInfo(
            trace_id=trace_id,
            trace_location=TraceLocation.from_experiment_id(experiment_id),
            request_time=begin_ns // 10**6,
            execution_duration=(ended_ns - begin_ns) // 10**6 if agent else None,
            state=TraceState.ERROR if failed else TraceState.OK,
            request_preview=_text(root.inputs)[:PREVIEW_CHARACTERS],
            response_preview=_text(root.outputs)[:PREVIEW_CHARACTERS],
            trace_metadata={"mlflow.sourceRun": run_id},
            tags={key: str(value)[:TAG_CHARACTERS] for key, value in tags.items()},
        )
        if row["score"] is not None:  # as MLflow's lists of traces show it
            at = dict.fromkeys(("create_time_ms", "last_update_time_ms"), ended_ns // 10**6)
            feedback = Feedback("score", row["score"], source=source, trace_id=trace_id, **at)
            feedback.assessment_id = f"a-{_digest(trace_id, 'score')[:32]}"
            info.assessments.append(feedback)
        client.start_trace(info)
        all_spans += spans
    # MLflow learns a server's version in one request of 3 s, and keeps a failure as long as the process lives.
    getattr(getattr(RestStore, "_get_server_version", None), "cache_clear", lambda: None)()
    client.log_spans(experiment_id, all_spans)


def _spans(trace_id: str, row: Row, agent: Mapping[str, Any] | None, begin_ns: int) -> Iterator[Span]:
    """Yields spans: the rollout's, then those of an agent's events or of the response, then the reward functions'."""
    from mlflow.entities import Span

    length, count = _length_ns(agent) / 1e9, 0

    def span(name: str, kind: str, since: float, until: float, shown: Mapping[str, Any], error: str = "") -> Span:
        """Makes a span. shown: its inputs, outputs and other attributes. Times in seconds since the rollout's start."""
        nonlocal count
        number, count = count, count + 1
        named = {"traceRequestId": trace_id, "spanType": kind, **shown}
        return Span.from_dict(
            {
                "trace_id": trace_id,
                "span_id": _digest(trace_id, number)[:16],
                "parent_span_id": _digest(trace_id, 0)[:16] if number else None,
                "name": name[:TAG_CHARACTERS],
                "start_time_unix_nano": begin_ns + int(max(0.0, since) * 1e9),
                "end_time_unix_nano": begin_ns + int(max(0.0, since, until) * 1e9),
                "events": [],
                "status": {"code": "STATUS_CODE_ERROR" if error else "STATUS_CODE_OK", "message": error},
                "attributes": {f"mlflow.{key}": json.dumps(value) for key, value in named.items()},
            }
        )

    messages = json.loads(row["messages"]) if row["messages"] else row["prompt"]
    known = ("advantage", "solved", "masked", "tokens", "prompt_tokens", "age", "data_source")
    whole = {
        "spanInputs": {"messages": messages, "ground_truth": row["ground_truth"]},
        "spanOutputs": {"answer": row["response"], "score": row["score"], "finish": row["finish"]},
        "rollout": {name: row[name] for name in known}
        | ({} if agent is None else {name: agent[name] for name in ("reward", "counts", "sequences")}),
    }
    error = row["error"] or (agent["error"] if agent else "")
    yield span(f"rollout {row['sample']}", "CHAIN" if agent is None else "AGENT", 0.0, length, whole, error)
    if agent is None:
        chat = {"spanInputs": {"messages": messages}, "spanOutputs": {"role": "assistant", "content": row["response"]}}
        yield span("response", "CHAT_MODEL", 0.0, length, chat | _usage(row["prompt_tokens"], row["tokens"]))
    for event in agent["events"] if agent else ():
        at = event["at"]
        match event["kind"]:
            case "turn":
                shown = {
                    "spanInputs": {"messages": event["given"]},
                    "spanOutputs": event["said"],
                    "turn": {key: value for key, value in event.items() if key not in ("given", "said")},
                }
                shown |= _usage(event["prompt_tokens"], event["tokens"])
                yield span(f"turn {event['number']}", "CHAT_MODEL", at, at + event["seconds"], shown)
            case "tool":
                failed = str(event.get("error") or "")
                shown = {"spanInputs": event.get("arguments"), "spanOutputs": event.get("result")}
                yield span(event["name"], "TOOL", at - event["seconds"], at, shown, failed)
            case kind:
                yield span(str(kind), "UNKNOWN", at, at, {"spanInputs": event})
    for name, outputs in _verdicts(row).items():
        inputs = {"answer": row["response"], "ground_truth": row["ground_truth"]}
        yield span(name, "EVALUATOR", length, length, {"spanInputs": inputs, "spanOutputs": outputs})


def _verdicts(row: Row) -> dict[str, dict[str, Any]]:
    """Returns score, metrics and notes by reward function. A row names the last two name.metric and name.note."""
    functions = {name: {"score": score} for name, score in row["parts"] or () if "." not in name}
    for values in (row["parts"], row["notes"]):
        for name, value in values or ():
            function, dot, what = name.rpartition(".")
            if dot:
                functions.setdefault(function, {})[what] = value
    return functions


def _usage(read: int, wrote: int) -> dict[str, Any]:
    return {"chat.tokenUsage": {"input_tokens": read, "output_tokens": wrote, "total_tokens": read + wrote}}


def _length_ns(agent: Mapping[str, Any] | None) -> int:
    """Returns nanoseconds from an agent's start to the end of its last event; 0 for others."""
    events = agent["events"] if agent else ()
    ends = [event["at"] + (event["seconds"] if event["kind"] == "turn" else 0.0) for event in events]
    return int(max([0.0, *ends]) * 1e9)


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
