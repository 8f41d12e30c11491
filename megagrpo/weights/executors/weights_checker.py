"""What a server without our loader holds, by SGLang's own /weights_checker: for engines that others manage.

On CPUs its checksum of a parameter is the first 8 bytes of the SHA-256 of the parameter's bytes (SGLang 0.5.23). From
the checkpoint that the server was given we make the parameters that it must have, compare their checksums with its own,
and digest them: digests of what the server holds, to be compared with the training ranks' like any others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megagrpo.errors import Problem, WeightSyncError
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.digest import combine, digests
from megagrpo.weights.executors.sglang_loader import LOAD_FORMAT
from megagrpo.weights.executors.staged_buckets import staged_buckets
from megagrpo.weights.executors.staging import Post, posted
from megagrpo.weights.files.loading import load_files
from megagrpo.weights.views import torch_dtype


def has_our_loader(server_info: Mapping[str, Any]) -> bool:
    """Whether the server of this /server_info can take digests itself."""
    return LOAD_FORMAT in (server_info.get("custom_weight_loader") or ())


def check_verifiable(server_info: Mapping[str, Any], name: str) -> None:
    """Raises WeightSyncError if nobody could tell what weights this server holds."""
    device = server_info.get("device")
    if not has_our_loader(server_info) and device != "cpu":
        raise WeightSyncError(
            Problem(
                f"{name}: its weights could not be verified",
                f"a server on {device} without megagrpo's weight loader; its checksums there are of a kind of its own",
                f"--custom-weight-loader {LOAD_FORMAT} among the server's arguments",
                "start it so, with megagrpo installed in its environment; or let megagrpo start the engines",
            )
        )


def checked_digests(
    post: Post, directory: Path, manifests: Sequence[Manifest], bucket_bytes: int
) -> list[dict[str, int]]:
    """By tensor rank: the digests of the checkpoint tensors that the server holds, proven by its checksums.

    `directory` is what it has loaded, `manifests` say what its ranks hold of it. Memory is about `bucket_bytes`.

    Raises WeightSyncError naming every parameter whose checksum is not the files', is missing, or is not planned.
    """
    answer = posted(post, "/weights_checker", {"action": "checksum"}, manifests[0].holder)
    ranks: list[Mapping[str, str]] = [rank["checksums"] for rank in answer["ranks"]]
    if len(ranks) != len(manifests):
        where = f"{manifests[0].holder}: /weights_checker"
        raise WeightSyncError(Problem(where, f"{len(ranks)} tensor ranks", f"{len(manifests)}, as planned"))
    found, problems = [], []
    for manifest, checksums in zip(manifests, ranks, strict=True):
        parts = []
        problems += [
            Problem(f"{manifest.holder}: {name}", "a parameter of the server", "one that the plan knows")
            for name in sorted(checksums.keys() - manifest.storages.keys())
        ]
        for bucket in staged_buckets(manifest.storages.values(), bucket_bytes):
            part = _only(manifest, bucket.begins)
            tensors = {
                name: torch.zeros(storage.shape, dtype=torch_dtype(storage.dtype))
                for name, storage in part.storages.items()
            }
            load_files(directory, part, tensors)
            for name, tensor in tensors.items():
                if checksums.get(name) != (needed := checksum(tensor)):
                    given = f"checksum {checksums[name]}" if name in checksums else "no such parameter on the server"
                    problems.append(
                        Problem(f"{manifest.holder}: {name}", given, f"{needed}, as the files of {directory} say")
                    )
            parts.append(digests(tensors, part.placements))
        found.append(combine(parts))
    if problems:
        raise WeightSyncError(problems)
    return found


def checksum(tensor: torch.Tensor) -> str:
    """SGLang's, of a tensor in memory of the CPU."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(memoryview(data)).digest()[:8].hex()


def _only(manifest: Manifest, names: Mapping[str, int]) -> Manifest:
    return Manifest(
        manifest.holder,
        {name: manifest.storages[name] for name in names},
        tuple(placement for placement in manifest.placements if placement.storage in names),
        tuple(fill for fill in manifest.fills if fill.storage in names),
    )
