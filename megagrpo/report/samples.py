"""Samples of runs as a page carries them: columns of all, and texts and tokens in chunks, opened when needed.

Samples beyond a page's size are left out by rules (`kept_rows`, `token_rows`), and the page says so (`left_out`).
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa

from megagrpo.errors import Problem, ReportError, first_line
from megagrpo.report.curves import labels
from megagrpo.report.embed import Columns, Part, encode
from megagrpo.report.run import RunRead
from megagrpo.report.sample_chunks import Chunks
from megagrpo.report.sample_rows import TEXTS, Rows, Source, read_rows, sources_of
from megagrpo.report.text import BRANCHES

PAGE_BYTES = 64_000_000
"""Most bytes of a page that samples take, in base64, unless a number of samples is asked for."""
TOKEN_SHARE = 0.2
"""Share of PAGE_BYTES that figures of tokens may take."""
TOKEN_BYTES = 9.0
"""About the bytes of a page that a token's figures take, compressed and in base64."""
ROW_BYTES = 150.0
"""About the bytes that a sample takes besides its texts and figures."""
PROBES = 8
SCRIPTS = ("vendor/diff.min.js", "samples_store.js", "sample_tokens.js", "sample_view.js", "samples.js")


def sample_parts(runs: Sequence[RunRead], samples: int | None = None) -> list[Part]:
    """Returns the section of samples; no section if all runs are fine-tuning. samples: as for sample_data."""
    columns, chunks = sample_data(runs, samples)
    if chunks:
        data, styles = {"samples": columns}, ("samples.css",)
        return [Part("samples", "Samples", data=data, late=chunks, scripts=SCRIPTS, styles=styles)]
    if all(run.recipe.get("kind") == "sft" for run in runs):
        return []
    text = "No samples are on disk. With <code>track.rollouts</code> each step writes some: open the report anew then."
    return [Part("samples", "Samples", html=f"<p class=soft>{text}</p>")]


def sample_data(runs: Sequence[RunRead], samples: int | None = None) -> tuple[Columns, dict[str, bytes]]:
    """Returns the columns of all samples, and encoded chunks of texts and tokens by name; empty if no run has samples.

    samples: most samples that are taken, however large the page becomes. None: as many as PAGE_BYTES hold. Raises
    ReportError if a file goes while it is read.
    """
    try:
        return _data(runs, samples)
    except (OSError, pa.ArrowException) as error:
        given, needed = first_line(error), "files that stay while they are read"
        raise ReportError(Problem("samples of the run", given, needed, "once more: the run has gone on")) from error


def _data(runs: Sequence[RunRead], samples: int | None) -> tuple[Columns, dict[str, bytes]]:
    everything = [source for number, run in enumerate(runs) for source in sources_of(run, number)]
    all_rows, sources, unreadable = read_rows(everything)
    if not len(all_rows):
        return {}, {}
    ratio = _ratio(sources)
    room = PAGE_BYTES * (1 - TOKEN_SHARE)
    while True:
        kept = kept_rows(all_rows, samples, room, ratio)
        rows = all_rows.where(kept)
        figured = token_rows(rows, int(PAGE_BYTES * TOKEN_SHARE / TOKEN_BYTES))
        sentences = left_out(runs, all_rows, rows, figured, samples) + unreadable
        told = {"runs": labels(runs), "told": sentences, "branches": BRANCHES}
        columns, chunks = _encoded(sources, all_rows, kept, figured, told)
        size = (len(encode(columns)) + sum(map(len, chunks.values()))) * 4 / 3
        if samples is not None or size <= PAGE_BYTES or kept.sum() <= 1:
            return columns, chunks
        room *= 0.95 * PAGE_BYTES / size


def kept_rows(rows: Rows, samples: int | None, room: float, ratio: float) -> np.ndarray:
    """Returns the rows that a page carries, bool [rows]. room: bytes of the page; ratio: its bytes for a byte of text.

    First each run's last step and its last evaluation of each set; then whole prompts, drawn by their ids: the same
    ones at each step and in each run, so that the page has all rows of a drawn prompt.
    """
    step, run, of_set, prompt = rows.numbers["step"], rows.numbers["run"], rows.codes["set"], rows.codes["prompt_id"]
    last = np.zeros(len(rows), bool)
    for one in set(zip(run.tolist(), of_set.tolist(), strict=True)):
        of = (run == one[0]) & (of_set == one[1])
        last |= of & (step == step[of].max())
    drawn = np.array([zlib.crc32(value.encode(errors="replace")) for value in rows.values["prompt_id"]], np.int64)
    order = np.lexsort((prompt, drawn[prompt], ~last))
    cost = np.ones(len(rows)) if samples is not None else rows.numbers["bytes"] * ratio + ROW_BYTES
    kept = np.zeros(len(rows), bool)
    kept[order[np.cumsum(cost[order]) <= (room if samples is None else samples)]] = True
    return kept


def token_rows(rows: Rows, tokens: int) -> np.ndarray:
    """Returns the rows whose tokens' figures a page carries, int64 [n], rising; at most `tokens` tokens in all.

    By turns from the newest step back, from the greatest mismatch, from the highest and the lowest score, and evenly
    from all steps.
    """
    there = np.flatnonzero(rows.numbers["figures"] > 0)
    spread = (there * 2654435761) % (1 << 32)
    step, score, mismatch = (rows.numbers[name][there] for name in ("step", "score", "mismatch"))
    turn = np.full(len(there), len(there))
    for key in (
        -step,
        np.where(np.isnan(mismatch), np.inf, -mismatch),
        np.where(np.isnan(score), np.inf, -score),
        np.where(np.isnan(score), np.inf, score),
        spread,
    ):
        place = np.empty(len(there), np.int64)
        place[np.lexsort((spread, key))] = np.arange(len(there))
        turn = np.minimum(turn, place)
    first = np.argsort(turn, kind="stable")
    sizes = rows.numbers["figures"][there]
    return np.sort(there[first[np.cumsum(sizes[first]) <= tokens]])


def left_out(
    runs: Sequence[RunRead], all_rows: Rows, rows: Rows, figured: np.ndarray, samples: int | None
) -> list[str]:
    """Returns sentences about the samples and figures that the page lacks, and the reasons."""
    told = []
    if len(rows) < len(all_rows):
        bound = f"it is bound to {PAGE_BYTES / 1e6:.0f} MB" if samples is None else f"--samples is {samples:,}"
        told.append(
            f"This page has {len(rows):,} of the {len(all_rows):,} samples on disk, because {bound}: those of the last "
            "step and of each set's last evaluation, then all samples of some prompts, the same prompts at every step. "
            "--samples N takes up to N, however large the page becomes."
        )
    known = int((rows.numbers["figures"] > 0).sum())
    if len(figured) < known:
        told.append(
            f"{len(figured):,} samples have figures of tokens in this page, {known:,} on disk: more would make it too "
            "large. They are, by turns, the newest, those with the greatest mismatch, with the highest and with "
            "the lowest score, and some of every step."
        )
    if known < len(rows):
        told.append(
            f"{len(rows) - known:,} samples have no figures of tokens on disk: track.rollouts.token_samples_per_step "
            "says how many samples of a step have them."
        )
    for run in runs:
        track = run.recipe.get("track")
        section = track.get("rollouts") if isinstance(track, dict) else None
        if isinstance(section, dict) and (limit := section.get("samples_per_step")):
            told.append(
                f"{run.name} keeps up to {limit} samples of each step and set on disk "
                "(track.rollouts.samples_per_step)."
            )
    return told


def _encoded(
    sources: Sequence[Source], all_rows: Rows, kept: np.ndarray, figured: np.ndarray, told: Mapping[str, Any]
) -> tuple[Columns, dict[str, bytes]]:
    """Returns columns and chunks of the kept rows. kept: bool [all rows]; figured: int64 [n], among the kept rows."""
    with_tokens = np.zeros(len(all_rows), bool)
    with_tokens[np.flatnonzero(kept)[figured]] = True
    ends = np.searchsorted(all_rows.source, np.arange(len(sources)), "right")
    with ThreadPoolExecutor(2, "samples of a page") as threads:
        chunks = Chunks(threads)
        for source, begin, end in zip(sources, [0, *ends[:-1]], ends, strict=True):
            if kept[begin:end].any():
                chunks.add(source, kept[begin:end], with_tokens[begin:end])
        return chunks.end(all_rows.where(kept), figured, told)


def _ratio(sources: Sequence[Source]) -> float:
    """Returns the bytes of a page for a byte of text, compressed and in base64; measured on some of the sources."""
    some = [sources[number] for number in np.linspace(0, len(sources) - 1, PROBES).astype(int)]
    texts = (source.read(TEXTS).slice(0, 64).to_pylist() for source in some)
    raw = "".join(str(value or "") for lines in texts for line in lines for value in line.values()).encode(
        errors="replace"
    )
    return len(gzip.compress(raw[:4_000_000])) / max(1, len(raw[:4_000_000])) * 4 / 3
