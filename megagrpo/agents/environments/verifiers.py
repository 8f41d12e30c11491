"""An environment of the verifiers package as an agent (https://github.com/PrimeIntellect-ai/verifiers).

Runs in the interpreter that has the package (agent.python), with the standard library and that only. Two packages have
had its name: up to 0.2 an environment has a data set and a rubric (ToolEnv, MultiTurnEnv, vf.load_environment); from
0.3 on, in verifiers.v1, a task set has tasks with rewards, which any harness may do.

    python verifiers.py '{"environment": ..., "arguments": {...}, "size": null}'

writes the environment's tasks to standard output, a line of JSON each (megagrpo prepare verifiers).
"""

from __future__ import annotations

import contextvars
import functools
import importlib.util
import itertools
import json
import math
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

DATA_SOURCE = "verifiers"
"""Prefix of the data source of a row that names a task of an environment by extra_info.split and index."""

_endpoint: contextvars.ContextVar[Any] = contextvars.ContextVar("the rollout's endpoint")


async def rollout(
    task: Any,
    endpoint: Any,
    environment: str,
    arguments: Mapping[str, Any],
    harness: str | Mapping[str, Any] = "null",
    runtime: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Returns the reward and metrics of the environment, and its rewards of single turns if it gives any. `harness` and
    `runtime` are for 0.3 and later. Raises ValueError if the row's task cannot be found."""
    loaded = load(environment, json.dumps(arguments, sort_keys=True))
    if is_old():
        return await with_rubric(loaded, task, endpoint, environment)
    return await with_harness(loaded, task, endpoint, environment, harness, dict(runtime or {"type": "subprocess"}))


def is_old() -> bool:
    major, minor = version("verifiers").split(".")[:2]
    return (int(major), int(minor)) < (0, 3)


# Made once in a process. Not in a thread: up to 0.2 environments set signal handlers.
@functools.cache
def load(environment: str, arguments: str) -> Any:
    """Returns the package's environment, or from 0.3 on its tasks. Raises ValueError if it scores groups together."""
    given, function = json.loads(arguments), function_of(environment) if ".py:" in environment else None
    if is_old():
        import verifiers

        made = function(**given) if function else verifiers.load_environment(environment, **given)
        if made.requires_group_rollouts:
            raise ValueError(f"{environment} scores the rollouts of a group together; each is scored by itself here")
        timed_tools(made)
        return made
    import verifiers.v1

    if function:
        return Tasks(function(**given))
    config = verifiers.v1.taskset_config_type(environment).model_validate({**given, "id": environment})
    return Tasks(verifiers.v1.load_taskset(config))


def function_of(environment: str) -> Callable[..., Any]:
    """Returns the function that FILE.py:FUNCTION names. Its file may import its neighbours."""
    file, _, function = environment.rpartition(":")
    path = Path(file).resolve()
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"environment_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is no file of Python")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)  # type: ignore[no-any-return]


# Up to 0.2.


async def with_rubric(made: Any, task: Any, endpoint: Any, environment: str) -> dict[str, Any]:
    from verifiers.clients import OpenAIChatCompletionsClient

    client = OpenAIChatCompletionsClient(client_of(endpoint.base_url).with_options(api_key=endpoint.api_key))
    _endpoint.set(endpoint)
    state = await made.rollout(row_of(made, task, environment), client, endpoint.model, {})
    if (error := state["error"]) is not None and not is_the_policys(error, begun=bool(state["trajectory"])):
        raise RuntimeError(f"{type(error).__name__}: {error.__cause__ or error}") from error
    await made.rubric.score_rollout(state)
    await made.rubric.cleanup(state)
    turns = {step["response"].id: step["reward"] for step in state["trajectory"] if step["reward"] is not None}
    return {**numbers(state["metrics"]), "score": state["reward"], "turn_rewards": turns or None}


@functools.cache
def client_of(base_url: str) -> Any:
    """Returns one client for all rollouts: a new one takes 20 ms. No timeout: the gateway and the rollout have one."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=base_url, api_key="-", timeout=None)


def row_of(made: Any, task: Any, environment: str) -> dict[str, Any]:
    """Returns the environment's own row, or one made of a row that is not the environment's."""
    if task.data_source != f"{DATA_SOURCE}/{environment}":
        return {
            "prompt": list(task.messages),
            "answer": task.ground_truth,
            "info": dict(task.extra_info),
            "example_id": 0,
        }
    split, index = task.extra_info.get("split", "train"), task.extra_info["index"]
    rows = made.get_eval_dataset() if split == "test" else made.get_dataset()
    row = rows[index] if index < len(rows) else {}
    check_same(last_text(row.get("prompt")), task, environment)
    return dict(row)


def is_the_policys(error: BaseException | None, *, begun: bool) -> bool:
    """Returns whether an error counts as the rollout's end: an answer that says nothing, or, once it has begun, a
    refusal of the gateway, as at a limit of turns or tokens."""
    from openai import APIStatusError
    from verifiers.errors import InvalidModelResponseError

    while error is not None:
        if isinstance(error, APIStatusError):
            return begun and 400 <= error.status_code < 500
        if isinstance(error, InvalidModelResponseError):
            return True
        error = error.__cause__
    return False


def timed_tools(made: Any) -> None:
    """Wraps the environment's `call_tool`: each call of a tool becomes an event."""
    call = getattr(made, "call_tool", None)
    if call is None:
        return

    async def timed(tool_name: str, *given: Any, **named: Any) -> Any:
        start, error = time.perf_counter(), ""
        try:
            return await call(tool_name, *given, **named)
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            _endpoint.get().event("tool", name=tool_name, seconds=time.perf_counter() - start, error=error)

    made.call_tool = timed


# From 0.3 on.


class Tasks:
    """Tasks by their index: of a task set, which may make them one after another without end, or of a list."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self._coming = iter(source)
        self._made: list[Any] = []

    def __getitem__(self, index: int) -> Any:
        """Returns the task of this index. Raises IndexError."""
        self._made += itertools.islice(self._coming, max(0, index + 1 - len(self._made)))
        return self._made[index]


async def with_harness(
    tasks: Tasks, task: Any, endpoint: Any, environment: str, harness: str | Mapping[str, Any], runtime: dict[str, Any]
) -> dict[str, Any] | None:
    import verifiers.v1 as vf

    if task.data_source != f"{DATA_SOURCE}/{environment}":
        raise ValueError(
            f"the row's data source is {task.data_source!r}, not '{DATA_SOURCE}/{environment}': its rows are made by "
            f"`megagrpo prepare verifiers {environment}`"
        )
    try:
        chosen = tasks[task.extra_info["index"]]
    except IndexError:
        chosen = None
    check_same(None if chosen is None else last_text(prompt_of(chosen.data)), task, environment)
    # The package takes a key from a variable only. It keeps variables with this in their name from subprocesses.
    variable = f"ROLLOUT_API_KEY_{uuid.uuid4().hex}"
    client = vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var=variable)
    chosen_harness = {"id": harness} if isinstance(harness, str) else dict(harness)
    config = vf.AgentConfig.model_validate({
        "model": endpoint.model, "client": client, "runtime": runtime, "harness": chosen_harness,
        "max_turns": task.limits.turns_max,
    })  # fmt: skip
    os.environ[variable] = endpoint.api_key
    try:
        trace = await vf.Agent(config).run(chosen)
    finally:
        del os.environ[variable]
    if not trace.ok:
        last = trace.errors[-1] if trace.errors else None
        if last and trace.num_turns and last.type == "ProviderError" and last.message.startswith("upstream 4"):
            return None  # the gateway gives no more answers, as at a limit; the task was not scored
        raise RuntimeError(f"{last.type}: {last.message}" if last else f"it stopped: {trace.stop_condition}")
    return {**numbers(trace.metrics), **numbers({name: given.value for name, given in trace.rewards.items() if given}),
            "score": trace.reward}  # fmt: skip


def prompt_of(data: Any) -> list[dict[str, str]]:
    """Returns a task's messages; its description or name if its user opens the conversation, so that it has none."""
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    return [*system, *plain(data.prompt or data.description or data.name or f"task {data.idx}")]


# Both.


def check_same(text: str | None, task: Any, environment: str) -> None:
    """Raises ValueError if the environment's task is not the one that the data file shows."""
    if text is None or text.strip() != last_text(task.messages).strip():
        index = task.extra_info["index"]
        given = "has no such task" if text is None else f"now has there {text[:200]!r}"
        raise ValueError(
            f"task {index} of {environment} is {last_text(task.messages)[:200]!r} in the data file; the environment "
            f"{given}: prepare its rows again, with the arguments of the recipe"
        )


def last_text(messages: Any) -> str:
    return plain(messages)[-1]["content"] if messages else ""


def text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(str(field(part, "text")) for part in content or [] if field(part, "type") == "text")


def field(given: Any, name: str) -> Any:
    return given.get(name) if isinstance(given, Mapping) else getattr(given, name, None)


def numbers(values: Mapping[str, Any] | None) -> dict[str, float]:
    return {name: float(value) for name, value in (values or {}).items() if value is not None and math.isfinite(value)}


def rows(environment: str, arguments: Mapping[str, Any], size: int | None) -> Iterator[dict[str, Any]]:
    """Yields prompt, ground_truth, split and index of each task; at most `size` of each split."""
    loaded = load(environment, json.dumps(arguments, sort_keys=True))
    if is_old():
        made = {"train": loaded.build_dataset(), "test": loaded.build_eval_dataset()}
        splits = {
            split: ((plain(row["prompt"]), row.get("answer")) for row in data or ()) for split, data in made.items()
        }
    elif size is None and not getattr(loaded.source, "bounded", True):
        raise ValueError(f"{environment} makes tasks without end: say how many with --size")
    else:
        splits = {"train": ((prompt_of(task.data), getattr(task.data, "answer", None)) for task in loaded.source)}
    for split, tasks in splits.items():
        for index, (prompt, truth) in enumerate(itertools.islice(tasks, size)):
            yield {"prompt": prompt, "ground_truth": truth, "split": split, "index": index}


def plain(messages: Sequence[Any] | str) -> list[dict[str, str]]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return [{"role": field(message, "role"), "content": text_of(field(message, "content"))} for message in messages]


if __name__ == "__main__":
    output, sys.stdout = sys.stdout, sys.stderr  # the environment's prints must not mix with the rows
    for task_row in rows(**json.loads(sys.argv[1])):
        print(json.dumps(task_row, default=str), file=output, flush=True)
