"""Groups in one safetensors file, written atomically: arrays of all their tokens, and JSON for all else.

    tokens, logprobs, versions    int32, float32, int32 [tokens of all samples]
    offsets                       int64 [samples + 1]: where each sample begins in them
    prompt_tokens, prompt_offsets int32 [tokens of all prompts], int64 [prompts + 1]
    json                          uint8 [bytes]: not in the header, because libraries refuse headers above 100 MB

A group may have no samples yet, unfinished ones or no scores. The header has a checksum of all of it. Values that only
parquet files have in extra_info, such as bytes and timestamps, are written as {"\\0type": [TYPE, TEXT]}.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any
from zoneinfo import ZoneInfo

import numpy as np
import pydantic
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from megagrpo.errors import CheckpointError, Problem, UnusableCheckpointError, brief, first_line
from megagrpo.types import FinishReason, Group, Prompt, Sample, Score
from megagrpo.weights.files import sync_directories

FORMAT = "megagrpo groups 1"
DTYPES = {
    "tokens": ("I32", np.int32),
    "logprobs": ("F32", np.float32),
    "versions": ("I32", np.int32),
    "offsets": ("I64", np.int64),
    "prompt_tokens": ("I32", np.int32),
    "prompt_offsets": ("I64", np.int64),
    "json": ("U8", np.uint8),
}
TYPE = "\0type"
HOLDS = "what JSON can hold, bytes, a decimal, or a time of at most microseconds"
NEEDED = "a whole file of groups, as this version writes them"
FIX = "restore the file, or make it again"

Text = pydantic.InstanceOf[str]  # also text with half of a surrogate pair, which a reward's error may have
Count = Annotated[int, pydantic.Field(ge=0, le=10**9)]


@dataclass(frozen=True)
class _SavedSample:
    index: Count
    finish: FinishReason
    text: Text


@dataclass(frozen=True)
class _SavedScore:
    value: float | None
    parts: dict[Text, float]
    error: Text
    masked: Text
    counted: tuple[float, ...]
    solved: bool


@dataclass(frozen=True)
class _SavedGroup:
    id: Text
    data_source: Text
    ground_truth: Text
    ability: Text
    extra_info: dict[Text, Any]
    samples: tuple[_SavedSample, ...]
    scores: tuple[_SavedScore, ...]


@dataclass(frozen=True)
class _Saved:
    groups: tuple[_SavedGroup, ...]
    notes: dict[Text, Any]


def write_groups(path: Path, groups: Sequence[Group], notes: Mapping[str, Any] | None = None) -> None:
    """Writes `path`, in place of what is there. notes: JSON values to be kept with the groups.

    Raises CheckpointError if the file cannot be written, or if a prompt's extra_info has a value of another kind.
    """
    samples = [sample for group in groups for sample in group.samples]
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
    """The groups and the notes of write_groups. Raises UnusableCheckpointError if the file is not as it was written."""
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
    """The file's arrays, whole and of the right types. Raises OSError, SafetensorError or ValueError."""
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
    counts = {len(arrays[name]) for name in ("tokens", "logprobs", "versions")}
    if len(counts) > 1:
        raise ValueError(f"tokens, logprobs and versions of {sorted(counts)} values")
    if any(arrays[name].min(initial=0) < 0 for name in ("tokens", "versions", "prompt_tokens")):
        raise ValueError("a token or a version below 0")
    samples = sum(len(group.samples) for group in saved.groups)
    tokens, logprobs, versions = (
        iter(_parts(arrays, name, "offsets", samples)) for name in ("tokens", "logprobs", "versions")
    )
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
            extra_info=_unpacked(group.extra_info),
        )
        made = tuple(
            Sample(group.id, sample.index, next(tokens), next(logprobs), next(versions), sample.finish, sample.text)
            for sample in group.samples
        )
        groups.append(Group(prompt, made, tuple(Score(**vars(score)) for score in group.scores)))
    return groups


def _saved(group: Group) -> dict[str, Any]:
    prompt = group.prompt
    return {
        "id": prompt.id,
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "ability": prompt.ability,
        "extra_info": _packed(dict(prompt.extra_info), f"extra_info of prompt {prompt.id}"),
        "samples": [{"index": s.index, "finish": s.finish, "text": s.text} for s in group.samples],
        "scores": [asdict(score) for score in group.scores],
    }


# --- arrays -----------------------------------------------------------------------------------------------------------


def _joined(name: str, parts: Sequence[Any]) -> np.ndarray:
    dtype = DTYPES[name][1]
    return np.concatenate([np.empty(0, dtype), *(np.asarray(part, dtype) for part in parts)])


def _offsets(lengths: Iterable[int]) -> np.ndarray:
    return np.cumsum([0, *lengths], dtype=np.int64)


def _parts(arrays: Mapping[str, np.ndarray], name: str, offsets: str, count: int) -> list[np.ndarray]:
    """The array cut at its offsets. Raises ValueError if they do not cut it into `count` parts."""
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


# --- extra_info -------------------------------------------------------------------------------------------------------


def _datetime_text(value: datetime) -> str:
    zone = value.tzinfo.key if isinstance(value.tzinfo, ZoneInfo) else ""
    return f"{value.replace(tzinfo=None) if zone else value} {value.fold} {zone}"


def _datetime(text: str) -> datetime:
    value, fold, zone = text.rsplit(" ", 2)
    found = datetime.fromisoformat(value).replace(fold=int(fold))
    return found.replace(tzinfo=ZoneInfo(zone)) if zone else found


TYPES: Mapping[type, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    bytes: (bytes.hex, bytes.fromhex),
    Decimal: (str, Decimal),
    date: (date.isoformat, date.fromisoformat),
    time: (time.isoformat, time.fromisoformat),
    datetime: (_datetime_text, _datetime),
    timedelta: (
        lambda value: f"{value.days} {value.seconds} {value.microseconds}",
        lambda text: timedelta(*map(int, text.split())),
    ),
}


def _packed(value: Any, where: str) -> Any:
    """The value as JSON. Raises CheckpointError, naming `where`, if it would not come back as the same."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_packed(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if type(value) is tuple:
        return {TYPE: ["tuple", _packed(list(value), where)]}
    if type(value) is dict and TYPE not in value and all(type(key) is str for key in value):
        return {key: _packed(item, f"{where}.{key}") for key, item in value.items()}
    if type(value) in TYPES:
        return {TYPE: [type(value).__name__, TYPES[type(value)][0](value)]}
    given = f"{brief(value)} of type {type(value).__name__}"
    raise CheckpointError(Problem(where, given, HOLDS, fix="write the column as text in the prompt file"))


def _unpacked(value: Any) -> Any:
    """The inverse of _packed. Raises ValueError."""
    if isinstance(value, list):
        return [_unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if TYPE not in value:
        return {key: _unpacked(item) for key, item in value.items()}
    match value[TYPE]:
        case ["tuple", list(items)]:
            return tuple(_unpacked(items))
        case [str(name), str(text)]:
            for known, (_, read) in TYPES.items():
                if known.__name__ == name:
                    try:
                        return read(text)
                    except (ArithmeticError, TypeError, KeyError) as error:  # a zone that this machine does not know
                        raise ValueError(f"{brief(value)}: {first_line(error)}") from error
    raise ValueError(f"a value {brief(value)}")
