"""The receiving end of one server, whatever way the weights come, and digests of what it then holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megagrpo.errors import EngineError, Problem, WeightSyncError
from megagrpo.weights.boxes import Manifest, Storage
from megagrpo.weights.executors.broadcast import BroadcastReceiver
from megagrpo.weights.executors.direct import DirectReceiver
from megagrpo.weights.executors.disk import DiskReceiver
from megagrpo.weights.executors.meeting import Meeting
from megagrpo.weights.executors.sglang_loader import LOAD_FORMAT
from megagrpo.weights.executors.sglang_remote import RemoteLoader
from megagrpo.weights.executors.staging import Post
from megagrpo.weights.executors.tensors import TensorsReceiver
from megagrpo.weights.executors.ways import IN_PLACE, Receiver, Way
from megagrpo.weights.executors.weights_checker import check_verifiable, checked_digests, has_our_loader
from megagrpo.weights.executors.whole_tensors import plan_for_engines
from megagrpo.weights.plan import WeightPlan


class ServerWeights:
    """One engine's weights. `name` is the engine's, `manifests` its ranks' in order, `device` cpu or cuda."""

    def __init__(
        self, post: Post, name: str, manifests: Sequence[Manifest], server_info: Mapping[str, Any], device: str
    ) -> None:
        self._post, self._name, self._manifests, self._device = post, name, manifests, device
        self._info = server_info
        self._loader: RemoteLoader | None = None
        self._receiver: Receiver | None = None
        self._bucket_bytes = 0
        self._directory: Path | None = None

    def connect(
        self, plan: WeightPlan, destinations: Sequence[int], way: Way, meeting: Meeting, bucket_bytes: int
    ) -> None:
        """Opens the end for this way, between the server's begin and end of an update. Raises WeightSyncError."""
        self.close()
        self._bucket_bytes = bucket_bytes
        if has_our_loader(self._info):
            holders = [manifest.holder for manifest in self._manifests]
            self._loader = RemoteLoader(meeting, holders, self._post_command)
            self._loader.connect(plan, destinations, way, bucket_bytes)
        elif way is Way.DISK:
            check_verifiable(self._info, self._name)
        else:
            raise WeightSyncError(
                Problem(
                    f"{self._name}: weights.transfer: {way}",
                    given="a server without megagrpo's weight loader",
                    needed=f"--custom-weight-loader {LOAD_FORMAT}, with megagrpo installed in its environment",
                    fix="start it so, or write weights.transfer: disk",
                )
            )
        if way not in IN_PLACE:  # then the receiver runs inside the server, by commands to our loader
            self._receiver = self._open_receiver(plan, destinations, way, meeting)

    def receive(self, version: int) -> None:
        """Writes the weights of the open sync. Raises WeightSyncError."""
        if self._receiver is not None:
            self._receiver.receive(version)
        elif self._loader is not None:
            self._loader.receive(version)
        else:
            raise EngineError(Problem(f"{self._name}: receive", given="no connection", needed="connect first"))

    def digests(self) -> list[Mapping[str, int]]:
        """By rank and checkpoint tensor, of what lies there, before the server's end of the update."""
        if self._loader is not None:
            return list(self._loader.digests())
        if self._directory is None:
            raise EngineError(Problem(f"{self._name}: digests", given="no weights have come", needed="receive first"))
        return list(checked_digests(self._post, self._directory, self._manifests, self._bucket_bytes))

    def bucket_digests(self, tensor: str, active: Sequence[int]) -> list[Mapping[str, Mapping[str, int]]]:
        """By rank, of one checkpoint tensor; empty for ways that have no buckets of exact shards."""
        if self._loader is None or self._receiver is not None:
            return []
        return list(self._loader.bucket_digests(tensor, active))

    def close(self) -> None:
        """Frees what the receiving end holds in this process. May be called twice."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = self._loader = None

    def _open_receiver(self, plan: WeightPlan, destinations: Sequence[int], way: Way, meeting: Meeting) -> Receiver:
        ranks = len(self._manifests)
        engine = destinations[0] // ranks
        cuda = self._device == "cuda"
        devices = [torch.device("cuda", index) if cuda else torch.device("cpu") for index in range(ranks)]
        match way:
            case Way.DIRECT:
                return DirectReceiver(
                    plan, destinations, meeting, self._bucket_bytes, self._post, self._name, self._describe, devices
                )
            case Way.TENSORS:
                whole = plan_for_engines(plan.sources, plan.destinations, ranks)
                return TensorsReceiver(
                    whole, engine, meeting, self._bucket_bytes, self._post, self._name, ranks, devices[0]
                )
            case Way.BROADCAST:
                backend = "nccl" if cuda else "gloo"
                return BroadcastReceiver(engine, destinations, meeting, self._post, self._name, backend)
            case Way.DISK:
                return DiskReceiver(engine, meeting, self._post_from_disk, self._name)
        raise ValueError(f"no receiver beside the server for {way}")

    def _describe(self) -> Sequence[Mapping[str, Storage]]:
        if self._loader is None:
            raise EngineError(Problem(f"{self._name}: describe", given="no connection", needed="connect first"))
        return self._loader.describe()

    def _post_command(self, serialized: list[str]) -> None:
        body = {"serialized_named_tensors": serialized, "load_format": LOAD_FORMAT, "flush_cache": False}
        self._post("/update_weights_from_tensor", body)

    def _post_from_disk(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self._directory = Path(body["model_path"])
        return self._post(path, body)
