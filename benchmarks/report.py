"""Time that a report takes to be made and to be opened: python -m benchmarks.report [--steps 1000] [--samples 100].

It makes a run with that many steps, about 150 metrics (tests/report_runs.py) and samples of each step, its report, and
opens this in headless Chromium from the disk. --samples 0: a run without samples.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from playwright.sync_api import Browser

from megagrpo.report.page import page
from megagrpo.report.run import read_run
from megagrpo.track.rollout_files import SCHEMA, rollout_file
from tests.report_browser import chromium, opened
from tests.report_runs import make_run

GROUP = 8
PROMPTS = 4000
MEAN_TOKENS = 200
EVALUATED_EVERY = 50
CURVES = 5  # of health
SOURCES = 117  # of data, each with a metric
DRAWN = "performance.getEntriesByName('health drawn')[0].startTime"
LISTED = "performance.getEntriesByName('samples-ready')[0].startTime"
LOADED = "performance.getEntriesByType('navigation')[0].loadEventEnd"
SEARCH = """async () => {
  const store = new samples.Store(await report.load("samples"));
  const began = performance.now();
  await store.search(/quosun/giu, new Uint8Array(store.rows), () => true);
  return performance.now() - began;
}"""
OPENINGS = 5  # of which the median is printed
SYLLABLES = ("ka", "lo", "mi", "ter", "sun", "ve", "dra", "pol", "ish", "an", "quo", "be", "ri", "mon", "tal", "e")


def write_run(directory: Path, steps: int, samples: int, seed: int = 0) -> None:
    """A run's directory as if it had trained: with rollouts/, unless samples is 0."""
    make_run(directory, steps, seed=seed, others=SOURCES, evaluate_every=EVALUATED_EVERY)
    if not samples:
        return
    (directory / "rollouts").mkdir()
    random = np.random.default_rng(seed)
    for step in range(1, steps + 1):
        skill = step / steps
        pq.write_table(_samples(random, step, "train", samples, skill), rollout_file(directory, step))
        if step % EVALUATED_EVERY == 0 or step == steps:
            path = rollout_file(directory, step, evaluation=True)
            pq.write_table(_samples(random, step, "held_out", samples, skill), path)


def _samples(random: np.random.Generator, step: int, of_set: str, count: int, skill: float) -> pa.Table:
    vocabulary = np.array(list(_vocabulary()), np.dtypes.StringDType())
    sizes = np.minimum(random.lognormal(np.log(MEAN_TOKENS) - 0.32, 0.8, count).astype(np.int64) + 2, 16 * MEAN_TOKENS)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    tokens = np.minimum(random.zipf(1.3, offsets[-1]), len(vocabulary)).astype(np.int32) - 1
    texts = vocabulary[tokens]
    texts[offsets[1:] - 1] = "<|im_end|>"
    first = 0 if of_set != "train" else (step * count // GROUP) % PROMPTS
    prompts = (first + np.arange(count) // GROUP) % PROMPTS
    solved = random.random(count) < 0.2 + 0.6 * skill
    score = np.where(solved, 1.0, 0.0)
    rollout = -random.exponential(0.4, offsets[-1])
    advantage = np.repeat(score - (0.2 + 0.6 * skill), sizes)
    responses = ["".join(texts[begin : end - 1].tolist()) for begin, end in pairwise(offsets.tolist())]
    lists = {
        "token_ids": tokens,
        "token_texts": texts,
        "token_versions": np.repeat(step - random.integers(0, 3, count), sizes),
        "rollout_logprobs": rollout,
        "train_logprobs": np.minimum(rollout + random.standard_t(2, offsets[-1]) * 0.01, 0),
        "entropies": random.exponential(0.5, offsets[-1]),
        "token_advantages": advantage,
    }
    asked = [
        f"Question {p}: if {p % 97} boats carry {p % 13 + 2} people each, how many is that?" for p in prompts.tolist()
    ]
    columns = {
        "step": np.full(count, step),
        "set": [of_set] * count,
        "data_source": [("numbers", "boats", "riddles")[p % 3] for p in prompts.tolist()],
        "ability": ["arithmetic"] * count,
        "prompt_id": [f"{of_set}:{p}" for p in prompts.tolist()],
        "sample": np.arange(count) % GROUP,
        "prompt": [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in asked],
        "messages": [json.dumps([{"role": "user", "content": text}]) for text in asked],
        "response": responses,
        "ground_truth": [str((p % 97) * (p % 13 + 2)) for p in prompts.tolist()],
        "score": score,
        "parts": [[("exact", value)] for value in score.tolist()],
        "notes": [[("exact.read", str(p % 97))] for p in prompts.tolist()],
        "answer": [str(p % 97) for p in prompts.tolist()],
        "error": [""] * count,
        "masked": [""] * count,
        "solved": solved,
        "advantage": advantage[offsets[:-1]] if of_set == "train" else [None] * count,
        "finish": np.where(sizes == 16 * MEAN_TOKENS, "length", "stop").tolist(),
        "prompt_tokens": np.full(count, 24),
        "tokens": sizes,
        "age": random.integers(0, 3, count),
        "agent": [None] * count,
    }
    arrays = {name: pa.array(values, SCHEMA.field(name).type) for name, values in columns.items()}
    for name, values in lists.items():
        kind = SCHEMA.field(name).type
        flat = pa.array(values.tolist() if name == "token_texts" else values, kind.value_type)
        arrays[name] = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat, type=kind)
    return pa.table([arrays[field.name] for field in SCHEMA], schema=SCHEMA)


def _vocabulary() -> Iterator[str]:
    for number in range(len(SYLLABLES) ** 3):
        one, two = divmod(number, len(SYLLABLES))
        yield (
            " " + SYLLABLES[two] + (SYLLABLES[one % len(SYLLABLES)] if one else "") + ("." if number % 29 == 28 else "")
        )


def measure(directory: Path, samples: int | None) -> dict[str, float]:
    """Makes the report of the run in `directory` and opens it; milliseconds are from the navigation on."""
    began = time.perf_counter()
    text = page([read_run(directory)], samples=samples)
    path = directory / "report.html"
    path.write_text(text, encoding="utf-8")
    found = {"seconds to make it": time.perf_counter() - began, "MB": path.stat().st_size / 1e6}
    with chromium() as browser:
        times = [_opened(browser, path) for _ in range(OPENINGS)]
    for name in times[0]:
        found[name] = float(np.median([of[name] for of in times]))
    return found


def _opened(browser: Browser, path: Path) -> dict[str, float]:
    with opened(browser, f"file://{path}") as shown:
        shown.locator("#health canvas").nth(CURVES - 1).wait_for()
        found = {"ms to the curves of its health": shown.evaluate(DRAWN)}
        if not shown.evaluate("document.querySelector('script[data-name=samples]') !== null"):
            return found
        shown.wait_for_selector(".samples-row")
        found |= {"ms to the list of samples": shown.evaluate(LISTED), "ms to all of the page": shown.evaluate(LOADED)}
        began = time.perf_counter()
        shown.click(".samples-row")
        shown.wait_for_selector(".sample-title")
        found["ms to open a sample"] = 1000 * (time.perf_counter() - began)
        found["ms to search all texts"] = shown.evaluate(SEARCH)
        found["samples in the page"] = shown.evaluate("report.load('samples').then((columns) => columns.rows)")
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=100, help="of each step")
    parser.add_argument("--most", type=int, default=None, help="as --samples of megagrpo report")
    parser.add_argument("--run", type=Path, default=None, help="directory of the run; kept, and used again")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = asked.run or Path(temporary) / "measured"
        if not (directory / "metrics.jsonl").exists():
            write_run(directory, asked.steps, asked.samples)
        print(f"{asked.steps} steps with {asked.samples} samples")
        for name, value in measure(directory, asked.most).items():
            print(f"{name:<28}{value:>12,.1f}")


if __name__ == "__main__":
    main()
