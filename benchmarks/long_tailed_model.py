"""Models whose responses end after a random number of tokens: most soon, a few late."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a script's path has its own folder alone

from examples.demo.model import make_model, make_tokenizer  # noqa: E402

ADDER, WARM_START = ROOT / ".cache" / "adder", ROOT / "runs" / "adder_sft_cpu" / "hugging_face"

CONSTANT = 8.0
"""First entry of each token's embedding; the others are near 0.02."""


def make_long_tailed_model(directory: Path, mean_tokens: float, positions: int) -> None:
    """Saves an untrained model of the demo's shape that stops after each token with a probability of 1 / mean_tokens.

    The first hidden entry is nearly the same for every token, and the end token's logit reads it alone.
    """
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = positions
    model = make_model(tokenizer, seed=0)
    vocabulary, hidden = model.lm_head.weight.shape
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = CONSTANT
        model.lm_head.weight[:, 0] = 0.0
        end = model.lm_head.weight[tokenizer.eos_token_id]
        end.zero_()
        # Other tokens' logits are near 0. RMSNorm makes the first entry about the root of the hidden size.
        end[0] = math.log((vocabulary - 1) / (mean_tokens - 1)) / math.sqrt(hidden)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_long_tailed_adder(directory: Path, median: float, spread: float, longest: int) -> Path:
    """The demo's warm start, taught to write letters after its answer: "#### 82 dddddddd". Its model's directory.

    How many letters it writes is random, as in what it is taught: log-normal with this median and deviation (spread) of
    the logarithm, at most `longest`. They say nothing of the sum. The letter stands for the power of two below their
    number, so that the last token tells about how likely the end is.
    """
    if (directory / "hugging_face" / "config.json").exists():
        return directory / "hugging_face"
    start, examples, drawn = directory / "start", directory / "padded.parquet", random.Random(0)
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(WARM_START, start)
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        settings = json.loads((start / name).read_text())
        (start / name).write_text(json.dumps(settings | {key: longest + 32}))
    rows = pq.read_table(ADDER / "sft_careless.parquet").to_pylist()
    for row in rows:
        letters = min(longest, int(drawn.lognormvariate(math.log(median), spread)))
        if letters:
            row["messages"][1]["content"] += " " + chr(ord("a") + int(math.log2(letters))) * letters
    pq.write_table(pa.Table.from_pylist(rows), examples)
    settings = [
        f"name={directory.name}",
        f"track={{directory: {directory.parent}, mlflow: null, console: off}}",
        f"model.path={start}",
        f"data.train=[{{path: {examples}}}]",
        f"data.tokens_max={longest + 32}",
        "train.total_steps=80",
        "train.tokens_per_microbatch=4608",
        "train.optimizer={lr: 2e-3, min_lr: 2e-4, schedule: cosine, warmup_steps: 3, beta2: 0.98}",
        "eval.sets={}",
        "checkpoint.every_steps=80",
    ]
    recipe = ROOT / "yaml_recipes" / "adder_sft_cpu.yaml"
    subprocess.run([sys.executable, "-m", "megagrpo.cli", "sft", str(recipe), *settings], check=True, cwd=ROOT)
    return directory / "hugging_face"
