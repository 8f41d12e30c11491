"""Exports local tensors of many ranks into Hugging Face safetensors files, without gathering anything.

One process lays out the files at their full size. Then every rank writes its boxes at their places. Then one process
gives the directory its name. All processes need the same file system.

    export = begin_export(directory, model_directory, arch, dtype)      # one process
    plan = make_plan(rank_manifests, export.files)                      # anywhere
    write_part(export, plan, rank, tensors)                             # every rank
    finish_export(export)                                               # one process, when all have written
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megagrpo.errors import CheckpointError, Problem
from megagrpo.weights.boxes import Manifest, Placement, Storage
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.parts.part import Tensor
from megagrpo.weights.files import publish
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.sides import checkpoint
from megagrpo.weights.views import box_view, in_storage, stored_tensors, torch_dtype

COPY_BYTES = 64 * 1024**2
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
COMPANIONS = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.model", "*.tiktoken", "tekken.json", "chat_template*", "*.jinja", "additional_chat_templates", "custom_generate",
    "*processor_config.json", "LICENSE*", "*.py",
)  # fmt: skip
"""Files and folders that belong to a model besides its config and its weights."""


@dataclass(frozen=True)
class Export:
    """An export under way: written in `partial`, renamed to `directory`, an absolute path, at the end."""

    directory: Path
    files: tuple[Manifest, ...]

    @property
    def partial(self) -> Path:
        return self.directory.with_name(f".{self.directory.name}.partial")


def begin_export(directory: str | Path, model_directory: str | Path, arch: Architecture, dtype: str) -> Export:
    """Makes the files at their full size, and copies the model's config, tokenizer and generation config beside them.

    Removes what an interrupted export to the same place left behind. `dtype` is a Storage's, such as bfloat16. Raises
    CheckpointError.
    """
    carried = checkpoint.carried_tensors(checkpoint.file_tensors(Path(model_directory)), arch)
    files = checkpoint.new_files(arch, dtype, others=bool(carried))
    export = Export(Path(directory).absolute(), files)
    begin(export, lambda: lay_out(export.partial, files, Path(model_directory), dtype, carried))
    return export


def begin_adapter_export(
    directory: str | Path, tensors: Sequence[Tensor], config: Mapping[str, Any], dtype: str
) -> Export:
    """Makes a PEFT directory with these tensors of adapters and this config. Raises CheckpointError."""
    storages = [Storage(tensor.name, tensor.shape, dtype) for tensor in tensors]
    file = checkpoint.new_file(ADAPTER_WEIGHTS, storages)
    export = Export(Path(directory).absolute(), (file,))

    def make() -> None:
        _write_json(export.partial / ADAPTER_CONFIG, dict(config))
        _write_empty(export.partial, file)

    begin(export, make)
    return export


def begin(export: Export, make: Callable[[], None]) -> None:
    """Removes the remains of an earlier attempt and makes the empty directory `partial`. `make` puts the files into it,
    without their values. Raises CheckpointError."""
    try:
        shutil.rmtree(export.partial, ignore_errors=True)
        export.partial.mkdir(parents=True)
        make()
    except OSError as error:
        shutil.rmtree(export.partial, ignore_errors=True)
        raise CheckpointError(_problem(export.directory, error)) from error


def lay_out(
    directory: Path,
    files: tuple[Manifest, ...],
    model_directory: Path,
    dtype: str,
    carried: checkpoint.FileTensors = MappingProxyType({}),
) -> None:
    """Makes the files in `directory` at their full size without their values, and one of the carried tensors, if any.

    Copies the model's other files, with `dtype` in config.json. README.md names carried tensors. Raises OSError.
    """
    for pattern in COMPANIONS:
        for companion in model_directory.glob(pattern):
            if companion.is_dir():
                shutil.copytree(companion, directory / companion.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(companion, directory / companion.name)
    config = json.loads((model_directory / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)  # the files have the plain weights
    # The key is dtype, torch_dtype in transformers 4, or both if the config has both.
    config |= dict.fromkeys(config.keys() & {"dtype", "torch_dtype"} or ["dtype"], dtype)
    _write_json(directory / "config.json", config)
    for file in files:
        _write_empty(directory, file)
    if len(files) + bool(carried) > 1:
        size = sum(storage.bytes for file in files for storage in file.storages.values())
        size += sum(entry.bytes for _, entry in carried.values())
        weight_map = {name: file.holder for file in files for name in file.storages}
        if carried:
            text = f"Not trained: {checkpoint.not_trained(carried)}.\n"
            (directory / "README.md").write_text(text, encoding="utf-8")
            last = checkpoint.numbered(len(files) + 1, len(files) + 1)
            weight_map |= dict.fromkeys(carried, last)
            _write_carried(directory / last, carried)
        _write_json(directory / checkpoint.INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})


def _write_carried(path: Path, carried: checkpoint.FileTensors) -> None:
    """Copies tensors from the model's files into a new one, COPY_BYTES at a time."""
    at, entries = 0, dict[str, checkpoint.Entry]()
    for name, (_, entry) in carried.items():
        entries[name] = replace(entry, begin=at, end=(at := at + entry.bytes))
    with path.open("wb") as into:
        into.write(checkpoint.encoded(entries))
        for origin, entry in carried.values():
            with origin.open("rb") as opened:
                opened.seek(entry.begin)
                for begin in range(entry.begin, entry.end, COPY_BYTES):
                    into.write(opened.read(min(COPY_BYTES, entry.end - begin)))
        into.flush()
        os.fsync(into.fileno())


def _write_empty(directory: Path, file: Manifest) -> None:
    header, entries = checkpoint.header_of(file)
    with (directory / file.holder).open("wb") as opened:
        opened.write(header)
        opened.truncate(max(entry.end for entry in entries.values()))


Copies = Iterable[tuple[Placement, torch.Tensor]]
"""Boxes of one file with their values, contiguous in host memory and of the file's dtype."""


def write_part(export: Export, plan: WeightPlan, source: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes the boxes of `source` into the files, cast to their dtype. Ranks write disjoint bytes, in any order."""
    for index in plan.destinations_of(source):
        write_copies(export, index, copies_for(export, plan, source, index, tensors))


def copies_for(
    export: Export, plan: WeightPlan, source: int, index: int, tensors: Mapping[str, torch.Tensor]
) -> Copies:
    """Yields the boxes that `source` sends to the export's `index`-th file, one copy after another."""
    storages = stored_tensors(plan.sources[source], tensors)
    for transfer in plan.direct(source, index):
        into, origin = transfer.destination_placement, transfer.source_placement
        dtype = torch_dtype(export.files[index].storages[into.storage].dtype)
        # A copy: memory that numpy has seen cannot be given back and restored (megatron/offload.py).
        with torch.no_grad():
            values = box_view(storages[origin.storage], origin).to("cpu", dtype, copy=True).contiguous()
        yield into, values


def write_copies(export: Export, index: int, copies: Copies) -> None:
    """Writes copies into the export's `index`-th file. Raises CheckpointError."""
    file = export.files[index]
    _, entries = checkpoint.header_of(file)
    try:
        with (export.partial / file.holder).open("r+b", buffering=0) as opened:
            for name, at, values in joined(copies, file.storages):
                write_box(opened.fileno(), entries[name], at, values)
            os.fsync(opened.fileno())
    except OSError as error:
        raise CheckpointError(_problem(export.partial / file.holder, error)) from error


def joined(copies: Copies, storages: Mapping[str, Storage]) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
    """Yields regions of these storages: name, start and contiguous values. Boxes that alternate in a folded storage
    wait for the others of their region and are one region with them: alone, each run would be one element."""
    waiting: dict[tuple[Any, ...], dict[int, torch.Tensor]] = defaultdict(dict)
    for into, values in copies:
        storage, part = storages[into.storage], in_storage(values, into)
        if not storage.folded:
            yield storage.name, into.at, part.contiguous()
            continue
        *start, column = into.at
        key = storage.name, tuple(start), tuple(part.shape)
        waiting[key][column] = part
        if len(waiting[key]) == storage.shape[-1]:
            columns = waiting.pop(key)
            yield storage.name, (*start, 0), torch.cat([columns[at] for at in sorted(columns)], -1).contiguous()
    for (name, start, _), columns in waiting.items():
        for column, part in columns.items():
            yield name, (*start, column), part.contiguous()


def finish_export(export: Export) -> None:
    """Gives the directory its name, in place of an earlier export. Call it when every rank has written."""
    try:
        publish(export.partial, export.directory)
    except OSError as error:
        raise CheckpointError(_problem(export.directory, error)) from error


def write_box(descriptor: int, entry: checkpoint.Entry, start: tuple[int, ...], values: torch.Tensor) -> None:
    """Writes contiguous values of a stored tensor, which begin at `start` in it, run by run. Raises OSError."""
    data = memoryview(values.view(-1).view(torch.uint8).numpy())
    run_bytes, offsets = entry.runs(start, tuple(values.shape), values.itemsize)
    for index, offset in enumerate(offsets):
        run, at = data[index * run_bytes : (index + 1) * run_bytes], entry.begin + offset
        while run:  # pwrite may write less than it is given
            written = os.pwrite(descriptor, run, at)
            run, at = run[written:], at + written


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _problem(path: Path, error: OSError) -> Problem:
    return Problem(f"export to {path}", error.strerror or str(error), "a directory that can be written")
