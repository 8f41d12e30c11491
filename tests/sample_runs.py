"""Samples of runs as their directories have them, made by hand: for tests of the browser of samples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megagrpo.evaluation.responses import Response, write_responses
from megagrpo.report.run import RunRead, read_run
from megagrpo.track.rollout_files import SCHEMA, rollout_file, trace
from tests.agent_runs import calculator_run

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "<!-- \u202eright to left\u202c \x00\x00\x00 \x1b[31m zero\u200bwidth"
)
LONG = "long " * 200_000


def sample(step: int, prompt: str = "sums:0", number: int = 0, **values: Any) -> dict[str, Any]:
    """A row of SCHEMA; its tokens are the words of its response."""
    response = values.get("response", f"I think it is {step + number}")
    words = [*(f" {word}" if place else word for place, word in enumerate(response.split(" "))), "<|im_end|>"]
    plain: dict[str, Any] = {
        "set": "train",
        "data_source": "sums",
        "ability": "arithmetic",
        "prompt": f"<|im_start|>user\nWhat is {prompt}?<|im_end|>\n<|im_start|>assistant\n",
        "messages": json.dumps(
            [{"role": "system", "content": "Add."}, {"role": "user", "content": f"What is {prompt}?"}]
        ),
        "response": response,
        "ground_truth": "391",
        "score": float(number % 2),
        "parts": [("exact", float(number % 2)), ("length", 0.25)],
        "notes": [("exact.read", "the last number")],
        "answer": str(step + number),
        "error": "",
        "masked": "",
        "solved": number % 2 == 1,
        "advantage": number - 0.5,
        "finish": "stop",
        "prompt_tokens": 12,
        "tokens": len(words),
        "age": step % 2,
    }
    figures = {
        "token_ids": list(range(len(words))),
        "token_texts": words,
        "token_versions": [step] * len(words),
        "rollout_logprobs": [-0.5] * len(words),
        "train_logprobs": [-0.5 + 0.01 * (place - 2) for place in range(len(words))],
        "entropies": [0.1 * place for place in range(len(words))],
        "token_advantages": [number - 0.5] * len(words),
    }
    return {
        "step": step,
        "prompt_id": prompt,
        "sample": number,
        **plain,
        **(figures if len(words) < 100 else {}),
        **values,
    }


def write_samples(directory: Path, step: int, rows: Sequence[dict[str, Any]], *, evaluation: bool = False) -> None:
    path = rollout_file(directory, step, evaluation=evaluation)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows), SCHEMA), path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def response(**values: Any) -> Response:
    plain: dict[str, Any] = {
        "set": "held_out",
        "prompt_id": "held:0",
        "index": 0,
        "data_source": "sums",
        "prompt": "What is 1 + 1?",
        "ground_truth": "2",
        "response": "It is 2",
        "finish": "stop",
        "tokens": 4,
        "score": 1.0,
        "solved": True,
        "answer": "2",
        "parts": {"exact": 1.0, "odd": None},
        "notes": {"exact.read": "2"},
        "error": "",
        "masked": "",
    }
    return Response(**plain | values)


def make_samples(directory: Path, shift: int = 0) -> RunRead:
    """A run of three steps, with all that samples can be: 3 x 2 prompts x 2, five odd ones, two evaluations."""
    directory.mkdir(parents=True)
    (directory / "recipe.yaml").write_text(f"name: {directory.name}\n", encoding="utf-8")
    (directory / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 1.0}) + "\n", encoding="utf-8")
    for step in (1, 2, 3):
        taught: dict[str, Any] = {"teacher_logprobs": [-0.25] * 9} if step == 2 else {}
        rows = [
            sample(
                step,
                f"sums:{prompt}",
                number,
                response=f"I think that {prompt} and {number} make {step + shift}",
                **taught,
            )
            for prompt in (0, 1)
            for number in (0, 1)
        ]
        write_samples(directory, step, rows)
    nothing = {"score": None, "solved": False, "advantage": None}
    call = json.dumps(trace(calculator_run()))
    odd = [
        sample(4, "odd:0", 0, response=HOSTILE, data_source="<b>odd</b>"),
        sample(4, "odd:1", 0, response=LONG, finish="length", tokens=200_001),
        sample(4, "odd:2", 0, masked="the judge's budget was spent", **nothing),
        sample(4, "odd:3", 0, error="exact: ZeroDivisionError", **nothing),
        sample(4, "odd:4", 0, response="It is 391.", agent=call),
    ]
    write_samples(directory, 4, odd)
    held_out = {
        "set": "held_out",
        "advantage": None,
        "train_logprobs": None,
        "entropies": None,
        "token_advantages": None,
    }
    write_samples(directory, 3, [sample(3, "held:0", 0, **held_out)], evaluation=True)
    write_responses(directory / "evaluations" / "step_000002.jsonl", [response(response="half \ud800 a character")])
    write_responses(
        directory / "eval" / "teacher" / "responses.jsonl", [response(score=None, error="late", solved=False)]
    )
    return read_run(directory)
