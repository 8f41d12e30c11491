"""The text of `megagrpo report --rollout`, and the runs of a directory, for `megagrpo runs`.

Reads files only, and of the metrics of listed runs only the ends: long runs are many bytes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megagrpo.errors import Problem, ReportError, first_line, printable
from megagrpo.report.run import require_directory
from megagrpo.track.jsonl import as_number, finite
from megagrpo.track.rollout_files import LEFT_OUT, ROLLOUTS, TRAIN, read_rollouts, rollout_steps
from megagrpo.track.status import has_process, held_out_scores, last_entry, read_status

Json = Mapping[str, Any]
BRANCHES = {
    "history": "these messages do not go on from an answer of this rollout",  # edited, compacted, or a sub-agent's
    "tools": "the answer that these messages go on from had other tools",
    "fork": "an answer that was gone on with already is gone on with again",  # tokens up to it are trained once
    "reasoning": "the chat template leaves out earlier reasoning",
    "tools_move": "the chat template writes the tools, or the system message, elsewhere",
    "role": "the chat template cannot add such a message",  # or none has been added
    "close": "the chat template ends an answer with no stop token",
    "stop_token": "the answer before ended with another stop token than the chat template writes",
    "audit": "an audit has shown that the chat template writes what follows the answer otherwise",
}
"""Reasons for which a turn begins another sequence, by BranchReason of agents/turns.py."""
CONVERSATION = (
    "step", "set", "prompt_id", "sample", "response", "ground_truth", "score", "parts", "error", "masked", "finish",
    "prompt_tokens", "tokens", "agent",
)  # fmt: skip
"""Columns of rollout_files.SCHEMA that a conversation is made of."""


# --- a rollout as a conversation -------------------------------------------------------------------------------------


def rollout_report(directory: Path, step: int, number: int) -> str:
    """Returns one rollout of a step as a conversation. number: from 0, among the step's kept ones, evaluations last.

    Raises ReportError.
    """
    rollouts, where = read_rollouts(directory, [step], CONVERSATION), str(directory / ROLLOUTS)
    if number < len(rollouts):
        try:
            return conversation(rollouts.slice(number, 1).to_pylist()[0])
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            needed = "a rollout as a run writes it"
            raise ReportError(Problem(f"{where}: step {step}, rollout {number}", first_line(error), needed)) from error
    given, needed = f"rollout {number} of step {step}", f"a number from 0 to {len(rollouts) - 1}"
    if not (steps := rollout_steps(directory)):
        given = "no rollouts"
        needed = "the directory of a run that has finished a step, with track.rollouts other than null"
    elif not len(rollouts):
        given, needed = f"step {step}, which has no rollouts", f"one of steps {steps[0]} to {steps[-1]}"
    raise ReportError(Problem(where, given, needed))


def conversation(row: Json) -> str:
    """Renders a rollout as text: messages by role, tool calls with their times and failures, tokens, rewards.

    row: the columns of CONVERSATION.
    """
    agent = None if row["agent"] is None else json.loads(row["agent"])
    of = "" if row["set"] == TRAIN else f", evaluation {printable(row['set'])}"
    score, why = row["score"], str(row["error"] or row["masked"] or "not scored")
    scored = f"score {score:g}" if score is not None else f"no score: {printable(why)}"
    lines = [
        f"step {row['step']}{of}, prompt {printable(row['prompt_id'])}, response {row['sample']}",
        f"{scored}; ended with {row['finish']}; {row['tokens']} tokens sampled",
    ]
    if parts := _numbers(row["parts"]):
        lines.append(f"rewards: {parts}")
    if agent is not None:
        if agent["error"]:
            lines.append(f"the agent failed: {printable(agent['error'])}")
        if agent["reward"]:
            lines.append(f"from the agent: {_numbers(agent['reward'].items())}")
        sizes = [f"{of['tokens']} tokens, {of['trained']} of them trained" for of in agent["sequences"]]
        lines.append(f"sequences: {'; '.join(sizes) or 'none'}")
        if counts := _numbers((name, value) for name, value in agent["counts"].items() if value):
            lines.append(f"counts: {counts}")
    lines.append(f"ground truth: {printable(row['ground_truth'])}")
    if agent is None:
        lines += ["", _head(f"policy, after a prompt of {row['prompt_tokens']} tokens"), _text(row["response"])]
    else:
        lines += [line for event in agent["events"] for line in ("", *_event(event))]
    return "\n".join(lines)


def _numbers(values: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{printable(name)} {value:g}" for name, value in values)


def _event(event: Json) -> Iterator[str]:
    match event["kind"]:
        case "turn":
            if event.get("branch"):
                yield f"(another sequence begins: {BRANCHES[event['branch']]})"
            yield from _messages(event["given"])
            parts = [f"turn {event['number']}", f"at {event['at']:.1f} s", f"{event['seconds']:.1f} s"]
            parts.append(f"{event['prompt_tokens']} tokens read, {event['given_tokens']} of them new")
            parts.append(f"{event['tokens']} sampled" + (", cut off" if event["finish"] == "length" else ""))
            if event.get("reward") is not None:
                parts.append(f"reward {event['reward']:g}")
            if "sequence" not in event:
                parts.append("not trained on")
            yield _head(f"policy: {', '.join(parts)}")
            yield from _said(event["said"])
        case "tool":
            failed = f", failed: {event['error']}" if event.get("error") else ""
            yield _head(f"the tool {event['name']} ran: {event['seconds']:.2f} s{failed}")
        case kind if kind == LEFT_OUT:
            yield f"... {event['events']} events are left out ..."
        case kind:
            rest = {name: value for name, value in event.items() if name not in ("kind", "at")}
            yield _head(f"{kind} at {event['at']:.1f} s")
            yield _text(_json(rest))


def _messages(messages: Any) -> Iterator[str]:
    """Yields the messages in front of a turn; a text where they did not fit into the trace."""
    if not isinstance(messages, list):
        yield _text(messages)
        return
    for message in messages:
        if not isinstance(message, dict):
            yield _text(message)
            continue
        name = message.get("name")
        yield _head(f"{message.get('role')}{f' {name}' if name else ''}")
        yield from _said(message)
        yield ""


def _said(message: Any) -> Iterator[str]:
    if not isinstance(message, dict):
        yield _text(message)
        return
    if thought := message.get("reasoning_content"):
        yield _text(f"(thinks) {thought}")
    if content := message.get("content"):
        yield _text(content)
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            yield _text(f"calls {function.get('name')} {_json(function.get('arguments'))}")


def _head(text: str) -> str:
    return printable(f"── {text}").replace("\n", " ")


def _text(value: Any) -> str:
    return printable(_json(value).expandtabs(4))


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# --- the runs of a directory ------------------------------------------------------------------------------------------

STYLES = {
    "running": "cyan",
    "finished": "green",
    "failed": "red",
    "lost": "red",
    "stopped": "yellow",
    "interrupted": "yellow",
}
WIDTH = 200
"""Characters of a line where no terminal limits it."""
UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def runs_in(directory: Path) -> list[dict[str, Any]]:
    """Returns the runs in `directory`, or itself if it is one, newest step first. Raises ReportError."""
    needed = "the directory of runs: track.directory of their recipes"
    require_directory(directory, needed, "name it: megagrpo runs DIRECTORY")
    directories = [directory] if is_run(directory) else [path for path in directory.iterdir() if is_run(path)]
    now = time.time()
    return sorted((listed(path, now) for path in directories), key=lambda run: (run["age_seconds"], run["name"]))


def is_run(directory: Path) -> bool:
    return (directory / "metrics.jsonl").is_file() and (directory / "recipe.yaml").is_file()


def listed(directory: Path, now: float) -> dict[str, Any]:
    """Returns the newest state of the run in `directory`, as JSON values. now: seconds since 1970.

    state: that of its status.json; lost, if its process ended without a final state; unknown, if an earlier version
    wrote it; unreadable, if no line of its metrics can be read. age_seconds: since its last step, or since its start.
    """
    status, last = read_status(directory), last_entry(directory)
    state: str = "unknown" if status is None else status.state
    if status is None or state == "running":  # `megagrpo track sync` has the lock of a run that has ended
        state = "running" if has_process(directory) else "unknown" if status is None else "lost"
    if not last and state != "running" and (directory / "metrics.jsonl").stat().st_size:
        state = "unreadable"
    began = status.started if status else (directory / "metrics.jsonl").stat().st_mtime
    return {
        "name": directory.resolve().name,
        "directory": str(directory),
        "state": state,
        "step": int(last.get("step", 0)),
        "total_steps": status.total_steps if status else None,
        "reward": finite(as_number(last.get("reward/mean"))),
        "held_out": {
            name: {"last": last, "step": step, "best": best, "best_step": best_step}
            for name, last, step, best, best_step in map(astuple, held_out_scores(directory))
        },
        "age_seconds": round(max(0.0, now - (finite(as_number(last.get("time"))) or began)), 1),
        "seconds_per_step": finite(as_number(last.get("seconds/step"))),
        **{name: getattr(status, name, None) for name in ("error", "host", "pid", "slurm_job")},
    }


def draw(runs: Sequence[dict[str, Any]], console: Console) -> None:
    """Prints a row for each run, and the error of each failed run."""
    table = Table("state", "step", "reward", "held-out", "last step", "s/step", "name", box=None, padding=(0, 2, 0, 0))
    for column in table.columns[1:6]:
        column.justify = "right"
    for column in table.columns:
        column.no_wrap = True
    for run in runs:
        table.add_row(
            Text(run["state"], STYLES.get(run["state"], "")),
            f"{run['step']}" if run["total_steps"] is None else f"{run['step']}/{run['total_steps']}",
            "" if run["reward"] is None else f"{run['reward']:.3f}",
            ", ".join(f"{score['last']:.3f}" for score in run["held_out"].values()),
            f"{age(run['age_seconds'])} ago",
            "" if run["seconds_per_step"] is None else f"{run['seconds_per_step']:.1f}",
            Text(run["name"], "bold"),
        )
    console.print(table)
    failed = [(run["name"], run["error"]) for run in runs if run["state"] == "failed" and run["error"]]
    if failed:
        console.print()
    for name, error in failed:
        console.print(Text(f"{name}: {error}"), soft_wrap=True)


def age(seconds: float) -> str:
    """Returns a duration as text: 45 s, 12 min, 3 h, 2 d."""
    return next((f"{seconds / unit:.0f} {name}" for unit, name in UNITS if seconds >= unit), f"{seconds:.0f} s")
