"""Groups in one safetensors file, written atomically: arrays of all their tokens, and JSON for all else.

    tokens, logprobs, versions    int32, float32, int32 [tokens of all samples]
    offsets                       int64 [samples + 1]: where each sample begins in them
    prompt_tokens, prompt_offsets int32 [tokens of all prompts], int64 [prompts + 1]
    branch_tokens, branch_trained int32, uint8 0 or 1 [tokens of all branches of all agents' rollouts]
    branch_offsets                int64 [branches + 1]
    kept_ids, kept_ends           int32 [ids of all samples], int64 [tokens of all samples]: KeptSets, -1 without any
    routes                        uint8: the bytes of all samples' and then all branches' Routes, end to end
    routes_shapes, routes_digests int64 [4 of each], rows, layers, experts of a token and bytes of an expert, 0 without
                                  routes; uint64 [of each]
    teacher_widths                int64 [samples]: k of TeacherTokens, -1 without any
    teacher_logprobs, teacher_ids, teacher_ids_logprobs    float32 [tokens of those with any], int32 and float32 [k of
                                  each of these tokens]
    json                          uint8 [bytes]: not in the header, because libraries refuse headers above 100 MB

A group may have no samples yet, unfinished ones or no scores. The header has a checksum of all of it. Values that only
parquet files have in extra_info, such as bytes and timestamps, are written as in typed_json, as are an agent's messages
and events. A checkpoint has such a file of the groups that no step has trained on (Pending).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from megagrpo.checkpoint.store import Checkpoint
from megagrpo.errors import CheckpointError, Problem, UnusableCheckpointError, brief, first_line
from megagrpo.routes import Routes, digest_of
from megagrpo.typed_json import packed, unpacked
from megagrpo.types import AgentRun, Branch, Group, KeptSets, Prompt, Sample, Score, TeacherTokens
from megagrpo.weights.files import sync_directories

FORMAT = "megagrpo groups 5"
FIELDS: Mapping[str, Mapping[str, type]] = {
    "": {"tokens": np.int32, "logprobs": np.float32, "versions": np.int32},
    "prompt_": {"tokens": np.int32},
    "branch_": {"tokens": np.int32, "trained": np.uint8},
}
"""Dtypes of the fields of samples, prompts and branches that are arrays, by the prefix of the arrays' names."""
DTYPES = {
    **{prefix + name: dtype for prefix, of in FIELDS.items() for name, dtype in {**of, "offsets": np.int64}.items()},
    "json": np.uint8,
}
SINCE_4: Mapping[str, type] = {
    "kept_ids": np.int32,
    "kept_ends": np.int64,
    "routes": np.uint8,
    "routes_shapes": np.int64,
    "routes_digests": np.uint64,
}
SINCE_5: Mapping[str, type] = {
    "teacher_widths": np.int64,
    "teacher_logprobs": np.float32,
    "teacher_ids": np.int32,
    "teacher_ids_logprobs": np.float32,
}
DTYPES |= {**SINCE_4, **SINCE_5}
EARLIER: Mapping[str, Collection[str]] = {
    "megagrpo groups 4": SINCE_5.keys(),
    "megagrpo groups 3": SINCE_4.keys() | SINCE_5.keys(),
}
"""Earlier formats that are read as well, and the arrays that they lack."""
CODES: Mapping[type, str] = {
    np.int32: "I32", np.float32: "F32", np.int64: "I64", np.uint8: "U8", np.uint64: "U64"
}  # fmt: skip
HOLDS = "what JSON can hold, bytes, a decimal, or a time of at most microseconds"
NEEDED = "a whole file of groups, as this version writes them"
FIX = "restore the file, or make it again"
PACKED = {"extra_info": "extra_info", "messages": "a message", "events": "an event"}
"""Fields whose values are written as in typed_json, and their names in errors."""
OPTIONAL: Mapping[str, Any] = {"baseline": None, "baseline_score": None, "taught": (), "given": ()}
"""Defaults of the fields that a group's JSON may lack: files of earlier formats have neither `taught` nor `given`."""
PENDING = "pending.safetensors"
"""In a checkpoint's rank directory."""

Arrays = Mapping[str, np.ndarray]
Notes = TypeVar("Notes")
Count = Annotated[int, msgspec.Meta(ge=0, le=10**12)]
Index = Annotated[int, msgspec.Meta(ge=0, le=10**9)]


def _json_type(*kinds: type, without: Collection[str] = (), **others: Any) -> Any:
    """Returns the type of these dataclasses' JSON, as one object: without some fields, and with others. No field has a
    default, so that none can be lost from a file, but for those of OPTIONAL."""
    hints = {name: hint for kind in kinds for name, hint in get_type_hints(kind).items()} | others
    fields = ((name, hint) for name, hint in hints.items() if name not in without)
    described = [(name, hint, *[OPTIONAL.get(name)] * (name in OPTIONAL)) for name, hint in fields]
    return msgspec.defstruct(f"{kinds[0].__name__}Json", described, kw_only=True)


AgentJson: Any = _json_type(AgentRun, branches=Index)
APART = ("prompt_id", *FIELDS[""], "routes", "kept", "teacher")
"""Fields of a sample that are not in its JSON."""
SampleJson: Any = _json_type(Sample, without=APART, index=Index, agent=AgentJson | None)
ScoreJson: Any = _json_type(Score)
GroupJson: Any = _json_type(
    *(Prompt, Group),
    without=("prompt", *FIELDS["prompt_"]),
    samples=Sequence[SampleJson],
    scores=Sequence[ScoreJson],
    baseline=SampleJson | None,
    baseline_score=ScoreJson | None,
)


@dataclass(frozen=True)
class Pending:
    """Groups of three kinds in order: those that dynamic sampling has dropped since the last step; those that have
    begun, in the order of their numbers; drawn prompts that have not begun."""

    groups: Sequence[Group]  # with the samples that are there, and scores if all are and were scored
    numbers: Sequence[int]  # of groups that have begun, including dropped ones
    versions: Sequence[int]  # the newest weights when they began
    next_number: int
    cursor: Mapping[str, Any]  # the place in the data behind them
    dropped: int = 0
    joints: Sequence[Mapping[int, Sequence[int]]] = ()  # as in Order, of groups that have begun
    verified: Sequence[int] = ()  # versions that engines were verified to hold, among those that sampled the groups
    unfinished: Callable[[], Sequence[Sequence[Sample]]] = tuple
    """Reads, by group, its unfinished samples that have tokens. () if that is not kept."""


@dataclass(frozen=True)
class _Notes:
    numbers: tuple[Count, ...]
    versions: tuple[Count, ...]
    next_number: Count
    cursor: dict[str, Any]
    dropped: Count = 0
    joints: tuple[dict[Count, tuple[Count, ...]], ...] = ()
    verified: tuple[Count, ...] = ()
    unfinished: tuple[Count, ...] = ()
    """Number of unfinished samples of each group, its last ones. () in files of earlier versions."""


def write_pending(path: Path, pending: Pending) -> None:
    """Writes pending groups. Raises CheckpointError."""
    unfinished = pending.unfinished() or [()] * len(pending.groups)
    whole = [
        replace(group, samples=(*group.samples, *samples))
        for group, samples in zip(pending.groups, unfinished, strict=True)
    ]
    notes = {field.name: getattr(pending, field.name) for field in fields(pending) if field.name != "groups"}
    write_groups(path, whole, notes | {"unfinished": list(map(len, unfinished))})


def pending_of(checkpoint: Checkpoint | None) -> Pending | None:
    """Reads pending groups; None if there are none. Raises UnusableCheckpointError if the file is not as written."""
    path = checkpoint.rank_directory / PENDING if checkpoint else None
    if path is None or not path.exists():
        return None
    groups, notes = read_groups(path, _Notes)
    if not notes.dropped <= len(notes.numbers) == len(notes.versions) <= len(groups):
        given = f"{len(notes.numbers)} numbers and {len(notes.versions)} versions of {len(groups)} groups"
        raise UnusableCheckpointError(Problem(str(path), given, "a number and a version of each that has begun"))
    lengths = [len(group.samples) for group in groups]
    counts = notes.unfinished or (0,) * len(groups)
    if len(counts) != len(groups) or any(count > length for count, length in zip(counts, lengths, strict=True)):
        given = f"{brief(counts)} unfinished ones of {brief(lengths)} samples"
        raise UnusableCheckpointError(Problem(str(path), given, "at most the samples of each group"))
    parts = [(group, length - count) for group, length, count in zip(groups, lengths, counts, strict=True)]
    finished = [replace(group, samples=group.samples[:cut]) for group, cut in parts]
    unfinished = [group.samples[cut:] for group, cut in parts]
    return Pending(finished, **vars(notes) | {"unfinished": lambda: unfinished})


def write_groups(path: Path, groups: Sequence[Group], notes: Mapping[str, Any] | None = None) -> None:
    """Writes `path`, in place of what is there. notes: JSON values to be kept with the groups.

    Raises CheckpointError if the file cannot be written, or if a prompt's extra_info has a value of another kind.
    """
    samples = [sample for group in groups for sample in group.responses]
    owners: dict[str, Sequence[Any]] = {
        "": samples,
        "prompt_": [group.prompt for group in groups],
        "branch_": [branch for sample in samples if sample.agent for branch in sample.agent.branches],
    }
    try:
        content = json.dumps({"groups": [_saved(group) for group in groups], "notes": notes or {}})
    except RecursionError as error:
        raise CheckpointError(Problem(str(path), "extra_info with values too deep in each other", HOLDS)) from error
    arrays: dict[str, np.ndarray] = {"json": np.frombuffer(content.encode(), np.uint8)}
    for prefix, of in FIELDS.items():
        for name, dtype in of.items():
            values: Iterable[np.ndarray] = (np.asarray(getattr(owner, name), dtype) for owner in owners[prefix])
            arrays[prefix + name] = np.concatenate([np.empty(0, dtype), *values])
        arrays[f"{prefix}offsets"] = np.cumsum([0, *(len(owner.tokens) for owner in owners[prefix])], dtype=np.int64)
    arrays |= _kept_arrays(samples) | _routes_arrays([*samples, *owners["branch_"]]) | _teacher_arrays(samples)
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


def read_groups(path: Path, notes: type[Notes]) -> tuple[list[Group], Notes]:
    """Reads the groups of write_groups, and its notes as a dataclass or another type.

    Raises UnusableCheckpointError if the file is not as written.
    """
    try:
        arrays = _arrays(path)
        content = json.loads(bytes(arrays["json"]))
        kind = msgspec.defstruct("GroupsJson", [("groups", list[GroupJson]), ("notes", notes)])
        saved: Any = msgspec.convert(content, kind, str_keys=True)
        return _groups(arrays, saved.groups), saved.notes
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise UnusableCheckpointError(Problem(str(path), first_line(error), NEEDED, FIX)) from error


def _arrays(path: Path) -> Arrays:
    """Reads the file's arrays, whole and of the right types. Raises OSError, SafetensorError or ValueError."""
    if not path.is_file():
        raise ValueError("no such file" if not path.exists() else "a directory, a device or a pipe")
    with safe_open(path, framework="numpy") as file:
        metadata, names = file.metadata() or {}, set(file.keys())
        wanted = {FORMAT: set(DTYPES), **{old: DTYPES.keys() - lacking for old, lacking in EARLIER.items()}}
        if names != wanted.get(metadata.get("format", "")):
            raise ValueError(f"format {brief(metadata.get('format'))} with arrays {brief(sorted(names))}")
        for name in names:
            dtype, view = DTYPES[name], file.get_slice(name)
            if view.get_dtype() != CODES[dtype] or len(view.get_shape()) != 1:
                raise ValueError(f"{name} has type {view.get_dtype()} and shape {brief(view.get_shape())}")
        arrays = {name: file.get_tensor(name) for name in names}
    if metadata.get("blake2b") != _checksum(arrays):
        raise ValueError("another checksum than when it was written")
    absent, counts = DTYPES.keys() - names, [len(arrays[name]) - 1 for name in ("offsets", "branch_offsets")]
    sizes = {"kept_ends": len(arrays["tokens"]), "teacher_widths": counts[0]}
    sizes |= {"routes_shapes": 4 * sum(counts), "routes_digests": sum(counts)}
    none = dict.fromkeys(("kept_ends", "teacher_widths"), -1)
    arrays |= {name: np.full(max(sizes.get(name, 0), 0), none.get(name, 0), DTYPES[name]) for name in absent}
    tokens = ("tokens", "versions", "prompt_tokens", "branch_tokens", "teacher_ids")
    if any(arrays[name].min(initial=0) < 0 for name in tokens):
        raise ValueError("a token or a version below 0")
    if arrays["branch_trained"].max(initial=0) > 1:
        raise ValueError("a token that is neither trained nor given")
    return arrays


def _parts(arrays: Arrays, prefix: str, count: int) -> Iterator[dict[str, np.ndarray]]:
    """Cuts arrays at their offsets, by field. Raises ValueError at once if these do not cut them into `count` parts."""
    cuts, of = arrays[f"{prefix}offsets"], {name: arrays[prefix + name] for name in FIELDS[prefix]}
    lengths = {len(array) for array in of.values()}
    if len(cuts) != count + 1 or cuts[0] != 0 or lengths != {cuts[-1]} or (np.diff(cuts) < 0).any():
        given = f"{' and '.join(prefix + name for name in of)} of {sorted(lengths)} values"
        raise ValueError(f"{prefix}offsets that do not cut {given} into {count} parts")
    return ({name: array[a:b].copy() for name, array in of.items()} for a, b in pairwise(cuts))


def _checksum(arrays: Arrays) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in [name for name in DTYPES if name in arrays]:
        digest.update(f"{name} {len(arrays[name])} ".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def _kept_arrays(samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    ends = [np.full(len(sample.tokens), -1) if sample.kept is None else sample.kept.ends for sample in samples]
    ids = [sample.kept.ids for sample in samples if sample.kept is not None]
    joined = {"kept_ids": ids, "kept_ends": ends}
    return {
        name: np.concatenate([np.empty(0, DTYPES[name]), *arrays]).astype(DTYPES[name])
        for name, arrays in joined.items()
    }


def _kept(arrays: Arrays, cuts: np.ndarray) -> Iterator[KeptSets | None]:
    """Cuts kept sets into samples. Raises ValueError at once if they do not belong to these tokens."""
    ids, of_samples = arrays["kept_ids"], [arrays["kept_ends"][a:b] for a, b in pairwise(cuts.tolist())]
    lasts = [max(int(ends[-1]), 0) if len(ends) else 0 for ends in of_samples]
    sound = all((ends == -1).all() or (ends[0] >= 0 and (np.diff(ends) >= 0).all()) for ends in of_samples)
    if not sound or len(arrays["kept_ends"]) != cuts[-1] or sum(lasts) != len(ids) or ids.min(initial=0) < 0:
        raise ValueError("kept sets that are not those of the tokens")
    starts = np.cumsum([0, *lasts])
    return (
        None if (ends == -1).all() else KeptSets(ids[a:b].copy(), ends.copy())
        for ends, (a, b) in zip(of_samples, pairwise(starts.tolist()), strict=True)
    )


def _routes_arrays(owners: Sequence[Sample | Branch]) -> dict[str, np.ndarray]:
    routes = [owner.routes for owner in owners]
    shapes = [(0,) * 4 if one is None else (*one.experts.shape, one.experts.itemsize) for one in routes]
    parts = [np.ascontiguousarray(one.experts).view(np.uint8).reshape(-1) for one in routes if one is not None]
    return {
        "routes": np.concatenate([np.empty(0, np.uint8), *parts]),
        "routes_shapes": np.array(shapes, np.int64).reshape(-1),
        "routes_digests": np.array([0 if one is None else one.digest for one in routes], np.uint64),
    }


def _routes(arrays: Arrays, owners: int) -> list[Routes | None]:
    """Cuts routes into those of samples and branches. Raises ValueError if they, or their digests, are others."""
    shapes, digests, data = arrays["routes_shapes"], arrays["routes_digests"].tolist(), arrays["routes"]
    sizes_fit = shapes.min(initial=0) >= 0 and shapes.max(initial=0) < 2**24
    if len(shapes) != 4 * owners or len(digests) != owners or not sizes_fit:
        raise ValueError(f"routes_shapes and routes_digests of others than {owners} samples and branches")
    made, at = list[Routes | None](), 0
    for (*shape, size), digest in zip(shapes.reshape(-1, 4).tolist(), digests, strict=True):
        part = data[at : at + math.prod(shape) * size]
        at += math.prod(shape) * size
        if size not in (0, 1, 2) or len(part) != math.prod(shape) * size or (size == 0 and digest != 0):
            raise ValueError("routes that are not of their shapes")
        experts = part.copy().view(np.uint8 if size == 1 else np.uint16).reshape(shape) if size else None
        if experts is not None and digest_of(experts) != digest:
            raise ValueError("routes with another digest")
        made.append(None if experts is None else Routes(experts, digest))
    if at != len(data):
        raise ValueError("routes that are not of their shapes")
    return made


def _teacher_arrays(samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    given = [sample.teacher for sample in samples]
    arrays = {"teacher_widths": np.array([-1 if one is None else one.ids.shape[1] for one in given], np.int64)}
    for name in list(SINCE_5)[1:]:
        its = (getattr(one, name.removeprefix("teacher_")).reshape(-1) for one in given if one is not None)
        arrays[name] = np.concatenate([np.empty(0, DTYPES[name]), *its]).astype(DTYPES[name])
    return arrays


def _teachers(arrays: Arrays, cuts: np.ndarray) -> Iterator[TeacherTokens | None]:
    """Cuts teachers' logprobs into those of samples. Raises ValueError at once if they don't belong to these tokens."""
    widths = arrays["teacher_widths"]
    counts = np.where(widths < 0, 0, np.diff(cuts)) if len(widths) == len(cuts) - 1 else np.zeros(0, np.int64)
    of_tokens, of_ids = np.cumsum([0, *counts]), np.cumsum([0, *(counts * widths)])
    logprobs, ids, ids_logprobs = (arrays[name] for name in list(SINCE_5)[1:])
    sound = len(widths) == len(cuts) - 1 and widths.min(initial=0) >= -1 and widths.max(initial=0) < 2**24
    if not sound or len(logprobs) != of_tokens[-1] or {len(ids), len(ids_logprobs)} != {of_ids[-1]}:
        raise ValueError("teachers' logprobs that are not those of the tokens")
    places = zip(widths.tolist(), pairwise(of_tokens.tolist()), pairwise(of_ids.tolist()), strict=True)
    return (
        None
        if width < 0
        else TeacherTokens(
            logprobs[a:b].copy(),
            *(array[c:d].reshape(b - a, width).copy() for array in (ids, ids_logprobs)),
        )
        for width, (a, b), (c, d) in places
    )


# --- groups as JSON ---------------------------------------------------------------------------------------------------


def _saved(group: Group) -> dict[str, Any]:
    return {
        **_json(group.prompt, f"prompt {group.prompt.id}", FIELDS["prompt_"]),
        "samples": [_saved_sample(sample) for sample in group.samples],
        "scores": [asdict(score) for score in group.scores],
        **({"baseline": _saved_sample(group.baseline)} if group.baseline else {}),
        **({"baseline_score": asdict(group.baseline_score)} if group.baseline_score else {}),
    }


def _saved_sample(sample: Sample) -> dict[str, Any]:
    run, where = sample.agent, f"sample {sample.index} of prompt {sample.prompt_id}"
    agent = run and {
        **_json(run, where),
        "branches": len(run.branches),
        "turns": [asdict(turn) for turn in run.turns],
        "reward": None if run.reward is None else dict(run.reward),
        "counts": dict(run.counts),
    }
    return {**_json(sample, where, APART), "agent": agent}


def _json(value: Any, where: str, without: Collection[str] = ()) -> dict[str, Any]:
    """Returns the fields of a dataclass, those of PACKED as JSON. Raises CheckpointError, naming the place below
    `where`, for a value that JSON would not preserve."""

    def refuse(other: Any, place: str) -> None:
        given = f"{brief(other)} of type {type(other).__name__}"
        raise CheckpointError(Problem(place, given, HOLDS, fix="write the column as text in the prompt file"))

    values = {field.name: getattr(value, field.name) for field in fields(value) if field.name not in without}
    for name in [name for name in values if name in PACKED]:
        place, given = f"{PACKED[name]} of {where}", values[name]
        one = isinstance(given, Mapping)
        values[name] = packed(dict(given), refuse, place) if one else [packed(dict(m), refuse, place) for m in given]
    return values


def _restored(kind: Any, saved: Any, **others: Any) -> Any:
    """Makes a dataclass of its JSON and of the other fields."""
    values = {field.name: getattr(saved, field.name) for field in fields(kind) if field.name not in others}
    for name in [name for name in values if name in PACKED]:
        given = values[name]
        values[name] = unpacked(given) if isinstance(given, Mapping) else tuple(map(unpacked, given))
    return kind(**values, **others)


def _groups(arrays: Arrays, saved: Sequence[Any]) -> list[Group]:
    samples = [sample for group in saved for sample in (*group.samples, group.baseline) if sample]
    of_samples, of_prompts = _parts(arrays, "", len(samples)), _parts(arrays, "prompt_", len(saved))
    count = sum(sample.agent.branches for sample in samples if sample.agent)
    of_branches, routes = _parts(arrays, "branch_", count), _routes(arrays, len(samples) + count)
    kept, of_sample_routes = _kept(arrays, arrays["offsets"]), iter(routes)
    teachers = _teachers(arrays, arrays["offsets"])
    branches = (
        Branch(of["tokens"], of["trained"].astype(bool), _of_tokens(one, len(of["tokens"])))
        for of, one in zip(of_branches, routes[len(samples) :], strict=True)
    )

    def made(prompt: Prompt, sample: Any) -> Any:
        of_sample = next(of_samples)
        agent = sample.agent and _agent(sample.agent, branches, len(of_sample["tokens"]))
        of_all = _of_tokens(next(of_sample_routes), len(prompt.tokens) + len(of_sample["tokens"]))
        apart: dict[str, Any] = {"routes": of_all, "kept": next(kept), "teacher": next(teachers), **of_sample}
        return _restored(Sample, sample, prompt_id=prompt.id, agent=agent, **apart)

    groups = []
    for group, of_prompt in zip(saved, of_prompts, strict=True):
        if len(group.scores) not in (0, len(group.samples)):
            raise ValueError(f"{len(group.samples)} samples with {len(group.scores)} scores")
        prompt = _restored(Prompt, group, tokens=tuple(of_prompt["tokens"].tolist()))
        whole = tuple(made(prompt, sample) for sample in group.samples)
        baseline = group.baseline and made(prompt, group.baseline)
        scores = tuple(_restored(Score, score) for score in group.scores)
        of_baseline = group.baseline_score and _restored(Score, group.baseline_score)
        groups.append(Group(prompt, whole, scores, baseline, of_baseline))
    return groups


def _of_tokens(routes: Routes | None, tokens: int) -> Routes | None:
    if routes is not None and routes.tokens != max(tokens - 1, 0):
        raise ValueError(f"routes of {routes.tokens} tokens, for a sequence of {tokens}")
    return routes


def _agent(saved: Any, branches: Iterable[Branch], tokens: int) -> Any:
    """Takes its branches from `branches`. Raises ValueError if they, or its turns, don't have the sample's tokens."""
    of_run = tuple(islice(branches, saved.branches))
    trained = sum(int(branch.trained.sum()) for branch in of_run)
    if trained != tokens or sum(turn.tokens for turn in saved.turns) != tokens:
        raise ValueError(f"branches and turns that do not have the {tokens} tokens of their sample")
    if any(turn.branch not in range(len(of_run)) or min(turn.number, turn.tokens) < 0 for turn in saved.turns):
        raise ValueError("a turn of a branch that is not there, or with numbers below 0")
    return _restored(AgentRun, saved, branches=of_run)
