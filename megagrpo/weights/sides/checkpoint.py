"""The safetensors files of a model directory by their headers, and the model that transformers loads, without torch."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from megagrpo.errors import ModelError, Problem, brief
from megagrpo.weights.blocks import SCALE_SUFFIX, scale_shape
from megagrpo.weights.boxes import ITEM_BYTES, Box, Manifest, Placement, Storage, in_groups
from megagrpo.weights.families import FAMILIES, read_architecture, renamed, tensors_of
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.families.parts.part import LayerTensors, all_rows
from megagrpo.weights.families.reading import json_object, read_json, refuse_pointer
from megagrpo.weights.sides.assembly import ManifestBuilder, tensors_by_role

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
FP8 = "F8_E4M3"
MXFP4 = "U8"
"""Two values of float4 in a byte, or the exponent of a block of MXFP4_VALUES with the bias of float32."""
MXFP4_BLOCKS, MXFP4_SCALES, MXFP4_VALUES = "_blocks", "_scales", 32
ACTIVATION_SCALE = ".activation_scale"
"""The suffix of a module's scale of what comes in, beside a weight with one scale; weights do not depend on it."""
STAND_FOR = {FP8: "bfloat16", MXFP4: "bfloat16"}
LARGEST_HEADER_BYTES = 100_000_000
INNER = "model."
"""The prefix of the inner model's names in the files of a model with a head, in transformers."""
NOTHING_UNUSED = "only what the config's model computes with, in its layers and modules"
FILE_BYTES = 5 * 1000**3
PROBLEMS_MAX = 8
"""The number of tensors that an error names as missing or wrong."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a safetensors file. `begin` and `end` are byte offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.begin

    def runs(self, start: tuple[int, ...], shape: tuple[int, ...], item_bytes: int) -> tuple[int, list[int]]:
        """Returns the runs of bytes of a region of the tensor: their size, and their offsets from its first byte."""
        whole = next((axis for axis in range(len(shape)) if shape[axis:] == self.shape[axis:]), len(shape))
        cut = max(whole - 1, 0)  # the last axis that is cut; a run includes the whole axes behind it
        strides = [prod(self.shape[axis + 1 :]) * item_bytes for axis in range(len(self.shape))]
        offsets = [sum(low * stride for low, stride in zip(start, strides, strict=True))]
        for size, stride in zip(shape[:cut], strides, strict=False):
            offsets = [offset + index * stride for offset in offsets for index in range(size)]
        return prod(shape[cut:]) * item_bytes, offsets


def manifests(directory: str | Path, arch: Architecture | None = None) -> tuple[Manifest, ...]:
    """Returns one manifest per safetensors file of the model; the holder is the file's name.

    `arch` lists the tensors to look for, by default config.json's. Experts may be stored one by one, or stacked as
    transformers 5 holds them. Weights in fp8 or MXFP4 are described as the bfloat16 that they stand for. Tensors
    outside of the model's modules are left out: see `extra_tensors`. Raises ModelError with all problems, the first
    PROBLEMS_MAX by name.
    """
    directory = Path(directory)
    arch = arch or read_architecture(directory)
    tensors = tensors_of(arch)
    parts, known = _known(arch)
    headers = [(path, read_header(path)) for path in weight_files(directory)]
    scales = {name: entry for _, entries in headers for name, entry in entries.items() if _is_scale(name)}
    problems, files = [], []
    held: set[str] = set()
    unknown: set[str] = set()
    for path, entries in headers:
        storages, placements = {}, []
        for stored_as, entry in entries.items():
            name = _stands_for(arch, stored_as)
            if name not in parts:
                unknown.add(stored_as)
            if name not in parts or _is_scale(stored_as):
                continue
            held.update(placement.box.tensor for placement in parts[name])
            if stored_as == name:
                problem = _entry_problem(entry, known[name].outer_shape, scales.get(name + SCALE_SUFFIX))
            else:
                problem = _mxfp4_problem(entry, known[name].outer_shape, scales.get(name + MXFP4_SCALES))
            if problem is not None:
                problems.append(Problem(f"{path.name}: {stored_as}", *problem))
            else:
                storages[name] = replace(known[name], dtype=(DTYPES | STAND_FOR)[entry.dtype])
                placements += parts[name]
        files.append(Manifest(path.name, storages, tuple(placements)))
    missing = [tensor for tensor in tensors if tensor.name not in held and not tensor.optional]
    if renamed := _renamed(directory, [tensor.name for tensor in missing], unknown):
        raise ModelError(renamed)
    problems += [
        Problem(f"{directory}: {tensor.name}", "in none of its safetensors files", str(list(tensor.shape)))
        for tensor in missing
    ]
    modules = {tensor.name.rpartition(".")[0] for tensor in tensors}
    problems += [
        Problem(
            f"{directory}: {name}", "a tensor that no part of the model takes", NOTHING_UNUSED, "correct config.json"
        )
        for name in sorted(unknown)
        if name.rpartition(".")[0] in modules or _layer_of(name) in range(len(arch.layers))
    ]
    if left := problems[PROBLEMS_MAX:]:
        problems[PROBLEMS_MAX:] = [
            Problem(str(directory), f"{len(left)} more tensors like these", "what config.json says")
        ]
    if problems:
        raise ModelError(problems)
    return tuple(files)


FileTensors = Mapping[str, tuple[Path, Entry]]
"""Tensors of a model's files by name: the file of each, and its entry there."""


def file_tensors(directory: Path) -> FileTensors:
    """Returns all tensors of a model directory; none of one without weights."""
    if not ((directory / INDEX).is_file() or (directory / SINGLE).is_file()):
        return {}
    return {name: (path, entry) for path in weight_files(directory) for name, entry in read_header(path).items()}


def extra_tensors(tensors: Iterable[str], arch: Architecture) -> list[str]:
    """Returns the names among a model's that no side holds, such as layers that predict further tokens."""
    parts, _ = _known(arch)
    return sorted(name for name in tensors if _stands_for(arch, name) not in parts)


def _is_scale(name: str) -> bool:
    return name.endswith((SCALE_SUFFIX, ACTIVATION_SCALE, MXFP4_SCALES))


def _stands_for(arch: Architecture, name: str) -> str:
    """Returns the name of the tensor that a stored one stands for, alone or with another; by default its own."""
    if FAMILIES[arch.family].mxfp4:
        name = name.removesuffix(MXFP4_BLOCKS).removesuffix(MXFP4_SCALES)
    if name.endswith(ACTIVATION_SCALE):
        return name.removesuffix(ACTIVATION_SCALE) + ".weight"
    return name.removesuffix(SCALE_SUFFIX)


def carried_tensors(tensors: FileTensors, arch: Architecture) -> FileTensors:
    """Returns those of a model's tensors that exports copy: of Family.carried, and of layers beyond the last one. In
    fp8 there are none: an export's config no longer says how to read them."""
    pattern = re.compile(FAMILIES[arch.family].carried)
    carried = {
        name: its for name, its in tensors.items() if pattern.fullmatch(name) or _layer_of(name) >= len(arch.layers)
    }
    return {} if any(entry.dtype == FP8 for _, entry in carried.values()) else carried


def not_trained(carried: FileTensors) -> str:
    """Returns a sentence or two about carried tensors: their numbers, bytes and names."""
    bytes_of = Counter[str]()
    for name, (_, entry) in carried.items():
        bytes_of[_CARRIED_NAME.sub(r"\1.*", name)] += entry.bytes
    which = ", ".join(f"{name} ({size / 2**20:,.1f} MiB)" for name, size in bytes_of.items())
    text = f"{len(carried)} tensors of the model's files, which exports copy: {which}"
    further = any(_layer_of(name) >= 0 or re.search(r"\bmtp[._]", name) for name in carried)
    fit = "; layers that predict further tokens no longer fit the trained ones: do not speculate with them"
    return text + fit * further


_CARRIED_NAME = re.compile(r"^((?:language_model\.|model\.)*(?:layers\.\d+|\w+))\..*")
"""A carried tensor's name: a layer's or a module's, and the rest."""


def _layer_of(name: str) -> int:
    """Returns the number of a tensor's layer; -1 for a tensor outside the layers, and for constants of old files."""
    match = re.match(r"(?:language_model\.|model\.){1,2}layers\.(\d+)\.", name)
    return int(match[1]) if match and not name.endswith("rotary_emb.inv_freq") else -1


def _renamed(directory: Path, missing: Sequence[str], unknown: Collection[str]) -> Problem | None:
    """Returns a problem if the files have most missing tensors under names with another prefix; otherwise None."""
    for prefix in {name.removesuffix(missing[0]) for name in unknown if missing and name.endswith("." + missing[0])}:
        if 2 * sum(prefix + name in unknown for name in missing) > len(missing):
            given, fix = f"names that begin with {prefix}", "save the model that torch.compile, DDP or PEFT wraps"
            return Problem(str(directory), given, f"names such as {missing[0]}", f"{fix} (save_pretrained)")
    if 2 * sum(name.removeprefix(INNER) in unknown for name in missing) > len(missing):
        given, fix = f"names without {INNER}: an AutoModel's", "load it with AutoModelForCausalLM, and save_pretrained"
        return Problem(str(directory), given, f"names such as {missing[0]}", fix)
    return None


def _known(arch: Architecture) -> tuple[dict[str, list[Placement]], dict[str, Storage]]:
    """Returns, by every name that a file may use, the parts of the model in that tensor, and its storage."""
    parts: dict[str, list[Placement]] = {}
    storages: dict[str, Storage] = {}
    for manifest in (transformers_manifest(arch, "float32"), stored(arch, "float32")):
        parts |= manifest.by_storage()
        storages |= manifest.storages
    return parts, storages


def transformers_manifest(arch: Architecture, dtype: str, holder: str = "transformers") -> Manifest:
    """Returns the manifest of a model that transformers has loaded: whole tensors, with the names of its
    `named_parameters()` as storages. A tied head is not among them.

    Experts are stacked as in transformers 5, whatever the family calls them: `mlp.experts.gate_up_proj`
    [experts, 2 ffn, hidden] and `mlp.experts.down_proj` [experts, hidden, ffn].
    """
    loaded = replace(stored(arch, dtype, stacked=True), holder=holder)
    return loaded.renamed(lambda name: renamed(name, FAMILIES[arch.family].in_transformers))


def stored(arch: Architecture, dtype: str | Mapping[str, str], *, stacked: bool = False) -> Manifest:
    """Returns the manifest of all tensors as the family's files hold them, in model order. `dtype` is that of the
    model, or one for each tensor. `stacked`: experts that the files hold one by one are stacked."""
    builder = ManifestBuilder("files", "float32")
    for layer, tensors in zip(arch.layers, tensors_by_role(arch).layers, strict=True):
        FAMILIES[arch.family].fuse(builder, layer, tensors)
        if stacked and tensors.experts and not FAMILIES[arch.family].stacks:
            _stack(builder, tensors)
    fused = builder.build()
    placements, storages = fused.by_storage(), dict[str, Storage]()
    storage_of = {its.box.tensor: its.storage for its in fused.placements}
    for tensor in tensors_of(arch):
        name = storage_of.get(tensor.name, tensor.name)
        if name not in storages:
            its = tensor.stored_as(dtype) if isinstance(dtype, str) else dtype[tensor.name]
            storages[name] = replace(fused.storages.get(name) or Storage(name, tensor.shape, its), dtype=its)
            placements.setdefault(name, [Placement.whole(tensor.box)])
    return Manifest("files", storages, tuple(its for name in storages for its in placements[name]))


def _stack(builder: ManifestBuilder, tensors: LayerTensors) -> None:
    experts, prefix = tensors.experts, tensors.roles["router"].name.removesuffix("gate.weight") + "experts."
    gate_up = [[all_rows(roles["expert_gate"]), all_rows(roles["expert_up"])] for roles in experts]
    builder.stacked(prefix + "gate_up_proj", gate_up, experts[0]["expert_up"].shape[1:])
    down = [[all_rows(roles["expert_down"])] for roles in experts]
    builder.stacked(prefix + "down_proj", down, experts[0]["expert_down"].shape[1:])


def _entry_problem(entry: Entry, shape: tuple[int, ...], scale: Entry | None) -> tuple[str, str] | None:
    """Returns a tensor's fault and what is needed, or None. `scale` is the entry of its scales if it is in fp8."""
    if entry.shape != shape:
        return str(list(entry.shape)), f"{list(shape)} by config.json"
    if entry.dtype != FP8:
        return None if entry.dtype in DTYPES else (f"dtype {entry.dtype}", f"one of {', '.join(DTYPES)}")
    wanted = list(scale_shape(shape))
    if scale is None or len(shape) != 2:
        return "a tensor in fp8 without scales", f"a matrix with {SCALE_SUFFIX} F32 {wanted}"
    if scale.dtype in DTYPES and scale.shape in ((), (1,)):  # one for the whole matrix
        return None
    if scale.dtype != "F32" or list(scale.shape) != wanted:
        return f"{SCALE_SUFFIX} {scale.dtype} {list(scale.shape)}", f"{SCALE_SUFFIX} F32 {wanted}"
    return None


def _mxfp4_problem(entry: Entry, shape: tuple[int, ...], scale: Entry | None) -> tuple[str, str] | None:
    """Returns the fault of blocks and their scales, which stand for a tensor of this shape, and what is needed."""
    if len(shape) != 3 or shape[1] % MXFP4_VALUES:
        return "blocks of MXFP4", f"a tensor of {list(shape)}"
    wanted = [shape[0], shape[2], shape[1] // MXFP4_VALUES]
    needed = f"{MXFP4} {[*wanted, MXFP4_VALUES // 2]} with {MXFP4_SCALES} {MXFP4} {wanted}"
    if (entry.dtype, list(entry.shape)) != (MXFP4, [*wanted, MXFP4_VALUES // 2]):
        return f"{entry.dtype} {list(entry.shape)}", needed
    if scale is None or (scale.dtype, list(scale.shape)) != (MXFP4, wanted):
        return "blocks without scales" if scale is None else f"{scale.dtype} {list(scale.shape)}", needed
    return None


def weight_files(directory: Path) -> list[Path]:
    """Returns the files that the index names, or the single file. Raises ModelError if one is missing, or if a single
    file has others beside it: transformers prefers it to an index, and SGLang reads all files if there is no index."""
    index, single = directory / INDEX, directory / SINGLE
    if not index.is_file():
        if not single.is_file():
            raise ModelError(_no_weights(directory))
        if shards := sorted(directory.glob("model-*-of-*.safetensors")):
            raise ModelError(_left_over(single, f"beside {shards[0].name}"))
        return [single]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        needed = "the index of a sharded safetensors checkpoint"
        raise ModelError(Problem(str(index), "no weight_map of file names", needed))
    paths = [directory / name for name in sorted(set(weight_map.values()))]
    if single.is_file() and single not in paths:
        raise ModelError(_left_over(single, f"beside {INDEX}, which names other files"))
    if absent := [path.name for path in paths if not path.is_file()]:
        given = f"{len(absent)} of its {len(paths)} files are not there: {', '.join(absent[:3])}"
        raise ModelError(Problem(str(index), given, "the model's weights as safetensors"))
    return paths


def _left_over(single: Path, given: str) -> Problem:
    needed = "one save of the weights: transformers would load this file, SGLang the others"
    return Problem(str(single), given, needed, "remove the files of the earlier save")


def _no_weights(directory: Path) -> Problem:
    """Returns the problem of a directory without SINGLE and INDEX, naming a file that it has instead."""
    names = {path.name for path in directory.glob("*")}
    needed = "the model's weights as safetensors"
    if shards := sorted(name for name in names if name.endswith(".safetensors")):
        return Problem(str(directory / INDEX), f"no such file, beside {shards[0]}", "the index of its files")
    if others := sorted(name for name in names if re.search(r"\.(bin|pth?|gguf|h5|msgpack)$", name)):
        fix = "load it with AutoModelForCausalLM.from_pretrained, and save_pretrained to another directory"
        return Problem(str(directory / SINGLE), f"no such file, but {others[0]}", needed, fix)
    return Problem(str(directory / SINGLE), "no such file", needed)


def read_header(path: Path) -> dict[str, Entry]:
    """Returns the entries of a safetensors file. Raises ModelError if it is invalid, or its size is wrong."""
    size = path.stat().st_size
    with path.open("rb") as file:
        refuse_pointer(path, file.peek())
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, LARGEST_HEADER_BYTES):
            raise ModelError(Problem(str(path), f"{size} bytes that do not start with a header", "a safetensors file"))
        header = json_object(path, file.read(length))
    begin = 8 + length
    try:
        entries = {name: _entry(entry, begin) for name, entry in header.items() if name != "__metadata__"}
    except (KeyError, TypeError, IndexError) as error:
        raise ModelError(Problem(str(path), f"a header without {error}", "a safetensors file")) from error
    except ValueError as error:
        raise ModelError(Problem(str(path), str(error), "a safetensors file")) from error
    if overlapping := _overlap(entries):
        given = f"{' and '.join(overlapping)} at the same bytes"
        raise ModelError(Problem(str(path), given, "a safetensors file", "copy or write the file again"))
    needed = max((entry.end for entry in entries.values()), default=begin)
    if size != needed:
        fix = f"copy the file again: it {'is cut short' if size < needed else 'has bytes of no tensor'}"
        raise ModelError(Problem(str(path), f"{size} bytes", f"{needed} bytes, by its header", fix))
    return entries


def _entry(given: Any, begin: int) -> Entry:
    """Returns an entry of a header, with offsets in the file. Raises ValueError if its values or bytes are wrong."""
    dtype, shape, (low, high) = given["dtype"], tuple(given["shape"]), given["data_offsets"]
    numbers = (*shape, low, high)
    if not isinstance(dtype, str) or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"a header with {brief(given)}")
    item_bytes = ITEM_BYTES.get(DTYPES.get(dtype, ""))
    if high < low or (item_bytes is not None and high - low != prod(shape) * item_bytes):
        raise ValueError(f"a header with {brief(given)}: {high - low} bytes")
    return Entry(dtype, shape, begin + low, begin + high)


def _overlap(entries: Mapping[str, Entry]) -> tuple[str, ...]:
    """Returns the names of two tensors that lie at the same bytes; empty if there are none."""
    filled = sorted((entry.begin, entry.end, name) for name, entry in entries.items() if entry.end > entry.begin)
    for (_, end, name), (begin, _, after) in itertools.pairwise(filled):
        if begin < end:
            return name, after
    return ()


def new_files(arch: Architecture, dtype: str | Mapping[str, str], others: int = 0) -> tuple[Manifest, ...]:
    """Returns the files of a checkpoint to be written: the tensors in model order, at most FILE_BYTES in each file.

    `dtype` is that of the model, or one for each tensor. A larger tensor has a file of its own. One file is called
    model.safetensors, several are numbered. `others` is the number of further files.
    """
    whole = stored(arch, dtype)
    placements = whole.by_storage()
    groups = in_groups(list(whole.storages.values()), FILE_BYTES)
    count = len(groups) + others
    names = [SINGLE] if count == 1 else [numbered(number, count) for number in range(1, len(groups) + 1)]
    return tuple(
        Manifest(name, {its.name: its for its in group}, tuple(at for its in group for at in placements[its.name]))
        for name, group in zip(names, groups, strict=True)
    )


def numbered(number: int, count: int) -> str:
    """Returns the name of the `number`-th of `count` files."""
    return f"model-{number:05}-of-{count:05}.safetensors"


def new_file(name: str, tensors: Sequence[Storage]) -> Manifest:
    """Returns the manifest of a file of whole tensors, to be written."""
    whole = (Box(tensor.name, (0,) * len(tensor.shape), tensor.shape) for tensor in tensors)
    return Manifest(name, {tensor.name: tensor for tensor in tensors}, tuple(map(Placement.whole, whole)))


def header_of(file: Manifest) -> tuple[bytes, dict[str, Entry]]:
    """Returns the header of a new file with these storages one after another, and the entry of each."""
    names = {torch_name: name for name, torch_name in DTYPES.items()}
    entries, at = dict[str, Entry](), 0
    for name, storage in file.storages.items():
        entries[name] = Entry(names[storage.dtype], storage.outer_shape, at, at := at + storage.bytes)
    start = encoded(entries)
    return start, {
        name: Entry(entry.dtype, file.storages[name].shape, len(start) + entry.begin, len(start) + entry.end)
        for name, entry in entries.items()
    }


def encoded(entries: Mapping[str, Entry]) -> bytes:
    """Returns the first bytes of a safetensors file: the size of its header, and the header, padded to 8 bytes. Offsets
    of the entries are behind it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, entry in entries.items():
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [entry.begin, entry.end]}
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
