"""An SGLang server's weight endpoints in this process: what it is sent, and what it would then hold.

It unpickles with the names that SGLang permits, maps shared memory without torch's helper process, and joins update
groups under the names that sglang.srt.utils.init_custom_process_group gives them.
"""

from __future__ import annotations

import base64
import io
import mmap
import pickle
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megagrpo.errors import EngineError, Problem
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.executors.weights_checker import checksum
from megagrpo.weights.views import torch_dtype
from tests.weight_streams import at_once, empty

PERMITTED = {
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
    ("torch._utils", "_rebuild_tensor"),
    ("torch.storage", "UntypedStorage"),
    ("torch", "Size"),
    ("torch", "float32"),
    ("torch", "bfloat16"),
    ("torch", "uint8"),
    ("types", "SimpleNamespace"),
}
"""Those of SafeUnpickler.ALLOWED_GLOBALS (sglang 0.5.23, srt/utils/common.py) that payloads may need."""
HEADER_BYTES = 64


class FakeServer:
    """One engine. `parameters` are its ranks' own; `loaded` what its loader was given under checkpoint names."""

    def __init__(self, manifests: Sequence[Manifest], fails_at: int = -1) -> None:
        self.parameters = [empty(manifest) for manifest in manifests]
        self.loaded: dict[str, torch.Tensor] = {}
        self.calls: list[tuple[str, Mapping[str, Any]]] = []
        self._manifests = manifests
        self._fails_at = fails_at
        self._groups: list[Any] = []
        self.heard: list[dict[str, torch.Tensor]] = [{} for _ in manifests]

    def describe(self) -> list[Mapping[str, Any]]:
        return [manifest.storages for manifest in self._manifests]

    def post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self.calls.append((path, body))
        if len(self.calls) - 1 == self._fails_at:
            self._groups.clear()  # its connections close
            raise EngineError(Problem("engine 0", "the connection broke"))
        match path:
            case "/update_weights_from_tensor":
                for parameters, payload in zip(self.parameters, body["serialized_named_tensors"], strict=True):
                    self._take(body["load_format"], _Reader(io.BytesIO(base64.b64decode(payload))).load(), parameters)
            case "/init_weights_update_group":
                self._groups = [None] * len(self.parameters)
                self._on_every_rank(lambda rank: self._join(rank, body))
            case "/update_weights_from_distributed":
                self._on_every_rank(lambda rank: self._hear(rank, body))
                assert all(torch.equal(self.heard[0][name], own[name]) for own in self.heard for name in own)
                self.loaded |= self.heard[0]
            case "/destroy_weights_update_group":
                self._groups = []
            case "/update_weights_from_disk":
                for file in Path(body["model_path"]).glob("*.safetensors"):
                    self.loaded |= load_file(file)
            case "/weights_checker":
                ranks = [{name: checksum(tensor) for name, tensor in own.items()} for own in self.parameters]
                return {"ranks": [{"checksums": checksums} for checksums in ranks]}
        return {"success": True}

    def _take(self, load_format: str, payload: Any, parameters: dict[str, torch.Tensor]) -> None:
        if load_format == "direct":
            for name, tensor in payload:
                assert tensor.shape == parameters[name].shape
                parameters[name].copy_(tensor)
            return
        assert load_format == "flattened_bucket"
        for entry in payload["metadata"]:
            flat = payload["flattened_tensor"][entry.start_idx : entry.end_idx]
            self.loaded[entry.name] = flat.view(entry.dtype).reshape(entry.shape).clone()

    def _on_every_rank(self, work: Callable[[int], None]) -> None:
        def one(rank: int) -> None:
            try:
                work(rank)
            except RuntimeError as error:  # what SGLang answers with status 400
                raise EngineError(Problem("a server", f"HTTP 400: {error}")) from error

        errors = at_once([partial(one, rank) for rank in range(len(self.parameters))])
        if error := next(filter(None, errors), None):
            raise error

    def _join(self, rank: int, body: Mapping[str, Any]) -> None:
        name = body["group_name"]
        store: Any = dist.TCPStore(body["master_address"], body["master_port"], is_master=False)
        for prefix in (name, f"{name}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        self._groups[rank] = dist.ProcessGroupGloo(
            store, body["rank_offset"] + rank, body["world_size"], timedelta(seconds=200)
        )

    def _hear(self, rank: int, body: Mapping[str, Any]) -> None:
        shapes = [torch.Size(shape) for shape in body["shapes"]]
        dtypes = [torch_dtype(dtype) for dtype in body["dtypes"]]
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._groups[rank].broadcast([flat], options).wait()
        begin = 0
        for name, shape, dtype, size in zip(body["names"], shapes, dtypes, sizes, strict=True):
            assert begin % dtype.itemsize == 0, f"{name} is not aligned"
            tensor = flat[begin : begin + size].view(dtype).reshape(shape).clone()
            self.heard[rank][name] = tensor
            begin += size


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in PERMITTED:
            raise pickle.UnpicklingError(f"SGLang would not load {module}.{name}")
        return _mapped if name == "rebuild_storage_filename" else super().find_class(module, name)


def _mapped(cls: type, manager: bytes, handle: bytes, size: int) -> torch.UntypedStorage:
    """As torch maps it: a file in /dev/shm of `size` bytes after a header, whose first int counts the users."""
    with open(f"/dev/shm{handle.decode()}", "r+b") as opened:
        mapped = mmap.mmap(opened.fileno(), HEADER_BYTES + size)
    assert int.from_bytes(mapped[:4], "little") > 1, "the server would remove the file"
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=HEADER_BYTES).untyped_storage()
