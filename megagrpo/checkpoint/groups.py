"""Groups in one safetensors file, written atomically: arrays of all their tokens, and JSON for all else.

    tokens, logprobs, versions    int32, float32, int32 [tokens of all samples]
    offsets                       int64 [samples + 1]: where each sample begins in them
    prompt_tokens, prompt_offsets int32 [tokens of all prompts], int64 [prompts + 1]
    branch_tokens, branch_trained int32, uint8 0 or 1 [tokens of all branches of all agents' rollouts]
    branch_offsets                int64 [branches + 1]
    json                          uint8 [bytes]: not in the header, because libraries refuse headers above 100 MB

A group may have no samples yet, unfinished ones or no scores. The header has a checksum of all of it. Values that only
parquet files have in extra_info, such as bytes and timestamps, are written as in typed_json, as are an agent's messages
and events.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pydantic
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from megagrpo import typed_json
from megagrpo.errors import CheckpointError, Problem, UnusableCheckpointError, brief, first_line
from megagrpo.types import AgentRun, Branch, FinishReason, Group, Prompt, Sample, Score, Turn
from megagrpo.weights.files import sync_directories

FORMAT = "megagrpo groups 3"
DTYPES = {
    "tokens": ("I32", np.int32),
    "logprobs": ("F32", np.float32),
    "versions": ("I32", np.int32),
    "offsets": ("I64", np.int64),
    "prompt_tokens": ("I32", np.int32),
    "prompt_offsets": ("I64", np.int64),
    "branch_tokens": ("I32", np.int32),
    "branch_trained": ("U8", np.uint8),
    "branch_offsets": ("I64", np.int64),
    "json": ("U8", np.uint8),
}
HOLDS = "what JSON can hold, bytes, a decimal, or a time of at most microseconds"
NEEDED = "a whole file of groups, as this version writes them"
FIX = "restore the file, or make it again"

Text = pydantic.InstanceOf[str]  # also text with half of a surrogate pair, which a reward's error may have
Count = Annotated[int, pydantic.Field(ge=0, le=10**9)]


@dataclass(frozen=True)
class _SavedAgent:
    branches: Count
    turns: tuple[Turn, ...]
    messages: tuple[dict[Text, Any], ...]
    reward: dict[Text, float] | None
    error: Text
    counts: dict[Text, float]
    events: tuple[dict[Text, Any], ...]


@dataclass(frozen=True)
class _SavedSample:
    index: Count
    finish: FinishReason
    text: Text
    agent: _SavedAgent | None


@dataclass(frozen=True)
class _SavedScore:
    value: float | None
    parts: dict[Text, float]
    error: Text
    masked: Text
    counted: tuple[float, ...]
    solved: bool
    notes: dict[Text, Text]
    answer: Text | None


@dataclass(frozen=True)
class _SavedGroup:
    id: Text
    data_source: Text
    ground_truth: Text
    ability: Text
    extra_info: dict[Text, Any]
    messages: tuple[dict[Text, Any], ...]
    text: Text
    samples: tuple[_SavedSample, ...]
    scores: tuple[_SavedScore, ...]
    baseline: _SavedSample | None = None
    baseline_score: _SavedScore | None = None


@dataclass(frozen=True)
class _Saved:
    groups: tuple[_SavedGroup, ...]
    notes: dict[Text, Any]


def write_groups(path: Path, groups: Sequence[Group], notes: Mapping[str, Any] | None = None) -> None:
    """Writes `path`, in place of what is there. notes: JSON values to be kept with the groups.

    Raises CheckpointError if the file cannot be written, or if a prompt's extra_info has a value of another kind.
    """
    samples = [sample for group in groups for sample in group.responses]
    branches = [branch for sample in samples if sample.agent for branch in sample.agent.branches]
    try:
        content = json.dumps({"groups": [_saved(group) for group in groups], "notes": notes or {}})
    except RecursionError as error:
        raise CheckpointError(Problem(str(path), "extra_info with values too deep in each other", HOLDS)) from error
    arrays = {
        "tokens": _joined("tokens", [sample.tokens for sample in samples]),
        "logprobs": _joined("logprobs", [sample.logprobs for sample in samples]),
        "versions": _joined("versions", [sample.versions for sample in samples]),
        "offsets": _offsets(len(sample.tokens) for sample in samples),
        "prompt_tokens": _joined("prompt_tokens", [group.prompt.tokens for group in groups]),
        "prompt_offsets": _offsets(len(group.prompt.tokens) for group in groups),
        "branch_tokens": _joined("branch_tokens", [branch.tokens for branch in branches]),
        "branch_trained": _joined("branch_trained", [branch.trained for branch in branches]),
        "branch_offsets": _offsets(len(branch.tokens) for branch in branches),
        "json": np.frombuffer(content.encode(), np.uint8),
    }
    attempt = path.with_name(f".saving_{path.name}")
    try:
        path.parent.mkdir(exist_ok=True)  # not those above it: of a run that was renamed, nothing is made anew
        attempt.touch()
        mode = attempt.stat().st_mode  # the user's own: the library's is for the owner alone
        save_file(arrays, attempt, metadata={"format": FORMAT, "blake2b": _checksum(arrays)})
        attempt.chmod(mode)
        with attempt.open("rb") as file:
            os.fsync(file.fileno())
        attempt.replace(path)
        sync_directories([path.parent])
    except (OSError, SafetensorError) as error:
        given, needed = first_line(error), "room for it in its directory"
        raise CheckpointError(Problem(f"{path} cannot be written", given, needed)) from error
    finally:
        with contextlib.suppress(OSError):
            attempt.unlink()


def read_groups(path: Path) -> tuple[list[Group], dict[str, Any]]:
    """Reads the groups and notes of write_groups. Raises UnusableCheckpointError if the file is not as written."""
    try:
        arrays = _arrays(path)
        content = json.loads(bytes(arrays["json"]))
        saved = pydantic.TypeAdapter(_Saved).validate_python(content)
        return _groups(arrays, saved), saved.notes
    except pydantic.ValidationError as error:
        wrong = error.errors()[0]
        given = f"{'.'.join(map(str, wrong['loc']))} is {brief(wrong['input'])}: {wrong['msg']}"
        raise UnusableCheckpointError(Problem(str(path), given, NEEDED, FIX)) from None
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise UnusableCheckpointError(Problem(str(path), first_line(error), NEEDED, FIX)) from error


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """Reads the file's arrays, whole and of the right types. Raises OSError, SafetensorError or ValueError."""
    if not path.is_file():
        raise ValueError("no such file" if not path.exists() else "a directory, a device or a pipe")
    with safe_open(path, framework="numpy") as file:
        metadata, names = file.metadata() or {}, set(file.keys())
        if metadata.get("format") != FORMAT or names != set(DTYPES):
            raise ValueError(f"format {brief(metadata.get('format'))} with arrays {brief(sorted(names))}")
        for name, (dtype, _) in DTYPES.items():
            view = file.get_slice(name)
            if view.get_dtype() != dtype or len(view.get_shape()) != 1:
                raise ValueError(f"{name} has type {view.get_dtype()} and shape {brief(view.get_shape())}")
        arrays = {name: file.get_tensor(name) for name in DTYPES}
    if metadata.get("blake2b") != _checksum(arrays):
        raise ValueError("another checksum than when it was written")
    return arrays


def _groups(arrays: Mapping[str, np.ndarray], saved: _Saved) -> list[Group]:
    for names in (("tokens", "logprobs", "versions"), ("branch_tokens", "branch_trained")):
        counts = {len(arrays[name]) for name in names}
        if len(counts) > 1:
            raise ValueError(f"{' and '.join(names)} of {sorted(counts)} values")
    if any(arrays[name].min(initial=0) < 0 for name in ("tokens", "versions", "prompt_tokens", "branch_tokens")):
        raise ValueError("a token or a version below 0")
    if arrays["branch_trained"].max(initial=0) > 1:
        raise ValueError("a token that is neither trained nor given")
    whole = [sample for group in saved.groups for sample in (*group.samples, group.baseline) if sample]
    tokens, logprobs, versions = (
        iter(_parts(arrays, name, "offsets", len(whole))) for name in ("tokens", "logprobs", "versions")
    )
    count = sum(sample.agent.branches for sample in whole if sample.agent)
    of_branches = (_parts(arrays, name, "branch_offsets", count) for name in ("branch_tokens", "branch_trained"))
    branches = (Branch(tokens, trained.astype(bool)) for tokens, trained in zip(*of_branches, strict=True))

    def made(prompt_id: str, sample: _SavedSample) -> Sample:
        arrays_of = next(tokens), next(logprobs), next(versions)
        agent = _agent(sample.agent, branches, len(arrays_of[0])) if sample.agent else None
        return Sample(prompt_id, sample.index, *arrays_of, sample.finish, sample.text, agent)

    prompts = _parts(arrays, "prompt_tokens", "prompt_offsets", len(saved.groups))
    groups = []
    for group, prompt_tokens in zip(saved.groups, prompts, strict=True):
        if len(group.scores) not in (0, len(group.samples)):
            raise ValueError(f"{len(group.samples)} samples with {len(group.scores)} scores")
        prompt = Prompt(
            id=group.id,
            tokens=tuple(prompt_tokens.tolist()),
            data_source=group.data_source,
            ground_truth=group.ground_truth,
            ability=group.ability,
            extra_info=typed_json.unpacked(group.extra_info),
            messages=tuple(map(typed_json.unpacked, group.messages)),
            text=group.text,
        )
        samples = [made(group.id, sample) for sample in group.samples]
        baseline = made(group.id, group.baseline) if group.baseline else None
        of_baseline = Score(**vars(group.baseline_score)) if group.baseline_score else None
        scores = tuple(Score(**vars(score)) for score in group.scores)
        groups.append(Group(prompt, tuple(samples), scores, baseline, of_baseline))
    return groups


def _agent(saved: _SavedAgent, branches: Iterator[Branch], tokens: int) -> AgentRun:
    """Takes its branches from `branches`. Raises ValueError if they, or its turns, don't have the sample's tokens."""
    of_run = tuple(islice(branches, saved.branches))
    trained = sum(int(branch.trained.sum()) for branch in of_run)
    if trained != tokens or sum(turn.tokens for turn in saved.turns) != tokens:
        raise ValueError(f"branches and turns that do not have the {tokens} tokens of their sample")
    if any(turn.branch not in range(len(of_run)) or min(turn.number, turn.tokens) < 0 for turn in saved.turns):
        raise ValueError("a turn of a branch that is not there, or with numbers below 0")
    return AgentRun(
        branches=of_run,
        turns=saved.turns,
        messages=tuple(map(typed_json.unpacked, saved.messages)),
        reward=saved.reward,
        error=saved.error,
        counts=saved.counts,
        events=tuple(map(typed_json.unpacked, saved.events)),
    )


def _saved(group: Group) -> dict[str, Any]:
    prompt = group.prompt
    return {
        "id": prompt.id,
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "ability": prompt.ability,
        "extra_info": _packed(dict(prompt.extra_info), f"extra_info of prompt {prompt.id}"),
        "messages": [_packed(dict(message), f"a message of prompt {prompt.id}") for message in prompt.messages],
        "text": prompt.text,
        "samples": [_saved_sample(sample) for sample in group.samples],
        "scores": [asdict(score) for score in group.scores],
        **({"baseline": _saved_sample(group.baseline)} if group.baseline else {}),
        **({"baseline_score": asdict(group.baseline_score)} if group.baseline_score else {}),
    }


def _saved_sample(sample: Sample) -> dict[str, Any]:
    run, where = sample.agent, f"sample {sample.index} of prompt {sample.prompt_id}"
    agent = run and {
        "branches": len(run.branches),
        "turns": [asdict(turn) for turn in run.turns],
        "messages": [_packed(dict(message), f"a message of {where}") for message in run.messages],
        "reward": None if run.reward is None else dict(run.reward),
        "error": run.error,
        "counts": dict(run.counts),
        "events": [_packed(dict(event), f"an event of {where}") for event in run.events],
    }
    return {"index": sample.index, "finish": sample.finish, "text": sample.text, "agent": agent}


# --- arrays -----------------------------------------------------------------------------------------------------------


def _joined(name: str, parts: Sequence[Any]) -> np.ndarray:
    dtype = DTYPES[name][1]
    return np.concatenate([np.empty(0, dtype), *(np.asarray(part, dtype) for part in parts)])


def _offsets(lengths: Iterable[int]) -> np.ndarray:
    return np.cumsum([0, *lengths], dtype=np.int64)


def _parts(arrays: Mapping[str, np.ndarray], name: str, offsets: str, count: int) -> list[np.ndarray]:
    """Cuts the array at its offsets. Raises ValueError if they do not cut it into `count` parts."""
    array, cuts = arrays[name], arrays[offsets]
    if len(cuts) != count + 1 or cuts[0] != 0 or cuts[-1] != len(array) or (np.diff(cuts) < 0).any():
        raise ValueError(f"{offsets} that do not cut {len(array)} {name} into {count} parts")
    return [array[start:end].copy() for start, end in pairwise(cuts)]


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in DTYPES:
        digest.update(f"{name} {len(arrays[name])} ".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def _packed(value: Any, where: str) -> Any:
    """Returns the value as JSON. Raises CheckpointError, naming `where`, if JSON would not preserve it."""

    def refuse(other: Any, place: str) -> None:
        given = f"{brief(other)} of type {type(other).__name__}"
        raise CheckpointError(Problem(place, given, HOLDS, fix="write the column as text in the prompt file"))

    return typed_json.packed(value, refuse, where)
