"""The text of `megagrpo report --mismatch`: what proves that the trained tokens are those that were sampled, how far
their logprobs still differ, where that comes from, and in which tokens."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pydantic

from megagrpo.errors import Problem, ReportError, printable
from megagrpo.report.run import read_yaml, require_directory
from megagrpo.track.jsonl import MISMATCH_FIGURES, MISMATCH_FILE, OWN_ROUTES, MismatchRecord, leaves

PROVEN, NOT_PROVEN, NOT_RECORDED = 0, 1, 2
"""Exit codes: all that the recipe asks for is proven; something is not; a version before proofs wrote the run."""
WORST_SHOWN, LAYERS_SHOWN = 10, 3
QUANTIZED = (
    "rollout.quantization is fp8: part of every figure is rounding in the engines. On a small model that alone made\n"
    "mean 0.00038, p99 0.0022, k3 6e-05 (emulated on CPUs, docs/mismatch.md#float8). How much it is of your model, a\n"
    "run with quantization: null shows."
)
"""Text for runs with fp8 engines; benchmarks/quantization.py measured the figures."""
SERVED = (
    "rollout.quantization is fp8, train.quantization same_as_rollout: the trainer computes with the engines' weights,\n"
    "so no figure is of their rounding. SGLang rounds inputs of products too, which the trainer does not."
)
"""Text for runs that train what fp8 engines serve."""
DTYPES = {
    "float32": "float32: sums in another order alone, about 1e-5 in a token of a small model",
    "bfloat16": "bfloat16 rounds 65,536 times more coarsely than float32; unlikely tokens differ most",
}
CHARACTERS_BEFORE = 30
CHARACTERS_AFTER = 10
LINE = pydantic.TypeAdapter(MismatchRecord)
Settings = Mapping[str, Any]
"""Values of the run's recipe, as it was read, by their dotted paths."""


def mismatch_report(directory: Path, steps: int) -> tuple[str, int]:
    """Reports the proofs of all steps and the mismatch of train and rollout logprobs; the table by step shows the last
    `steps`. Returns the text and the exit code. Raises ReportError."""
    require_directory(directory)
    records, recipe = read_mismatch(directory), read_yaml(directory / "recipe.yaml")
    if not records and recipe.get("kind") == "sft":
        where = directory / "metrics.jsonl"
        return f"A fine-tuning run has no rollouts to compare. Its losses are in {where}.", PROVEN
    if not records:
        return "No step has trained on any token yet.", PROVEN
    settings = dict(leaves(recipe))
    proofs, code = _proofs(records)
    lines = [*proofs, "", *_by_step(records, steps), *_routes(records), "", "Where it comes from:"]
    return "\n".join([*lines, *_sources(records, settings), "", *_worst(records)]), code


def read_mismatch(directory: Path) -> list[MismatchRecord]:
    """Reads every whole line of the run's mismatch.jsonl; a last line that is still being written is left out.

    Numbers that were not finite are NaN. Raises ReportError if there is no such file, or if it is not one of ours.
    """
    path = directory / MISMATCH_FILE
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    except OSError as error:
        needed = f"the directory of a run that has started: each writes {MISMATCH_FILE}"
        raise ReportError(Problem(str(path), error.strerror or str(error), needed)) from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(LINE.validate_json(line, strict=True))
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
            given, needed = f"{line[:80]} ({why})", f"a line that {MISMATCH_FILE} has"
            raise ReportError(Problem(f"{path}:{number}", given, needed)) from error
    return records


# --- proofs -----------------------------------------------------------------------------------------------------------


def _proofs(records: Sequence[MismatchRecord]) -> tuple[list[str], int]:
    """Returns a line for each proof over all steps, and the exit code."""
    unrecorded = [record.step for record in records if record.proof is None]
    proven = [(record, record.proof) for record in records if record.proof is not None]
    lines = []
    if unrecorded:
        lines.append(f"Not recorded in {len(unrecorded)} steps, the first is {unrecorded[0]}: a version before proofs.")
    if not proven:
        return lines, NOT_RECORDED
    versions = [version for _, proof in proven for version, _ in proof.versions]
    quantized = next((proof.quantization for _, proof in proven if not proof.same_bits), None)
    checks: dict[str, tuple[list[int | None], str, str]] = {  # tokens by step, what they are, and why nothing is asked
        "weights": (
            [proof.verified for _, proof in proven],
            f"were sampled by versions {min(versions, default=0)} to {max(versions, default=0)}, each verified by "
            "digest on every engine before it sampled",
            "",
        ),
        "routes": (
            [proof.routed for _, proof in proven],
            "passed the experts that their engine chose",
            "not asked for: no experts, engines that return no routes, or algorithm.routing: own",
        ),
        "sets": (
            [proof.kept for _, proof in proven],
            "have the set that they were drawn from",
            "none needed: tokens were drawn from the whole vocabulary",
        ),
        "tokens": (
            [min(record.tokens, proof.tokens) if proof.same_bits else None for record, proof in proven],
            "have a logprob of the trainer's, through weights with the engines' bits",
            f"not asked for: the engines' weights are {printable(str(quantized))}, the trainer's are not",
        ),
    }
    lines.append(f"Proofs, over the trained tokens of {len(proven)} steps:")
    missing = False
    for name, (found, text, otherwise) in checks.items():
        counts = [
            (record.step, n, proof.tokens) for (record, proof), n in zip(proven, found, strict=True) if n is not None
        ]
        lacking = [step for step, count, of in counts if count < of]
        have, of = (sum(values) for values in list(zip(*counts, strict=True))[1:]) if counts else (0, 0)
        steps = f"in {len(counts)} steps, " if len(counts) < len(proven) else ""
        first = f"; NOT {of - have:,}, first in step {lacking[0]}" if lacking else ""
        lines.append(f"  {name:8}{steps}{have:,} of {of:,} {text}{first}" if counts else f"  {name:8}{otherwise}")
        missing |= bool(lacking)
    return lines, NOT_PROVEN if missing else NOT_RECORDED if unrecorded else PROVEN


# --- what remains -----------------------------------------------------------------------------------------------------


def _by_step(records: Sequence[MismatchRecord], steps: int) -> list[str]:
    shown = records[-steps:]
    of = f"the last {len(shown)} of {len(records)} steps" if len(shown) < len(records) else "all steps"
    rows = [
        [str(record.step), str(record.tokens), *(_number(getattr(record, name)) for name in MISMATCH_FIGURES)]
        for record in shown
    ]
    return [
        "What remains: train logprob - rollout logprob of the trained response tokens, in nats",
        "",
        f"By step ({of}; mean, p99 and max of the absolute difference):",
        *_table(("step", "tokens", *MISMATCH_FIGURES), rows),
    ]


def _routes(records: Sequence[MismatchRecord]) -> Iterator[str]:
    """Yields what replay changes: the figures without it, and the layers in which most tokens would go elsewhere."""
    proofs = [(record, record.proof) for record in records if record.proof is not None]
    if own := [(record, proof.own_routes) for record, proof in proofs if proof.own_routes is not None]:
        yield ""
        yield f"With replay, and with the trainer's own routes (medians of {len(own)} steps):"
        replayed = [[getattr(record, name) for name in OWN_ROUTES] for record, _ in own]
        without = [[figures.get(name, math.nan) for name in OWN_ROUTES] for _, figures in own]
        rows = [[name, *map(_number, np.median(of, 0))] for name, of in (("replay", replayed), ("own", without))]
        yield from _table(("routes", *OWN_ROUTES), rows, left=("routes",))
    differ = [proof.route_differences for _, proof in proofs if proof.route_differences]
    if differ:
        shares = np.mean([of_layers for of_layers in differ if len(of_layers) == len(differ[-1])], 0)
        worst = [f"{at} ({shares[at]:.2%})" for at in np.argsort(-shares)[:LAYERS_SHOWN]]
        yield ""
        yield (
            f"Tokens whose own route would be another: {shares.mean():.2%} in the mean of {len(shares)} layers with "
            f"experts; most in {', '.join(worst)}, counted from 0"
        )


def _sources(records: Sequence[MismatchRecord], settings: Settings) -> Iterator[str]:
    """Yields in words where the rest comes from, by what the recipe says and what the steps counted."""
    dtype = settings.get("model.dtype")
    if dtype == "auto":
        dtype = {"cpu": "float32", "cuda": "bfloat16"}.get(str(settings.get("cluster.device")), "auto")
    yield f"  dtype: {DTYPES.get(str(dtype), 'bfloat16 on GPUs, float32 on CPUs')}"
    engine = printable(str(settings.get("rollout.engine")))
    yield f"  kernels: the engine ({engine}) and Megatron-Core round the same sums in other places, in other batches"
    proofs = [(record.step, record.proof) for record in records if record.proof is not None]
    behind = [(step - 1 - version, tokens) for step, proof in proofs for version, tokens in proof.versions]
    if old := sum(tokens for by, tokens in behind if by > 0):
        share = old / sum(tokens for _, tokens in behind)
        yield f"  older weights: they sampled {share:.1%} of the tokens, at most {max(behind)[0]} versions before"
    if settings.get("algorithm.rollout_logprobs_as_old") is True and settings.get("algorithm.minibatches") != 1:
        yield "  policy: with algorithm.rollout_logprobs_as_old later minibatches follow optimizer steps"
    if any(proof.routed is None for _, proof in proofs):
        yield "  routes: if the model has experts, the trainer's routers may choose others: none are replayed"
    if settings.get("rollout.quantization"):
        yield SERVED if settings.get("train.quantization") else QUANTIZED


def _worst(records: Sequence[MismatchRecord]) -> list[str]:
    tokens = [(record.step, token, token.difference) for record in records for token in record.worst]
    worst = heapq.nlargest(WORST_SHOWN, tokens, key=lambda row: math.inf if math.isnan(row[2]) else row[2])
    token_rows = [
        [
            str(step),
            _number(difference),
            _number(token.train_logprob, ".4f"),
            _number(token.rollout_logprob, ".4f"),
            str(token.weight_version),
            _line(token.prompt_id),
            str(token.sample),
            str(token.position),
            f"{_line(token.before)[-CHARACTERS_BEFORE:]}【{_line(token.text)}】{_line(token.after)[:CHARACTERS_AFTER]}",
        ]
        for step, token, difference in worst
    ]
    return [
        "Worst tokens of all steps, 【marked】 in their text:",
        *_table(
            ("step", "difference", "train", "rollout", "version", "prompt", "sample", "position", "text"),
            token_rows,
            left=("prompt", "text"),
        ),
    ]


def _number(value: float, form: str = ".3g") -> str:
    return "not finite" if math.isnan(value) else f"{value:{form}}"


def _line(text: str) -> str:
    """Returns `text` in one line."""
    return printable(text).replace("\n", "\\n")


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ()) -> list[str]:
    """Returns a text table, columns two spaces apart. Columns in `left` are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if heading in left else text.rjust(width)
            for heading, text, width in zip(headings, row, widths, strict=True)
        ).rstrip()
        for row in (headings, *rows)
    ]
