"""Weights of a served model: the code inside vLLM's workers, and its caller outside (vLLM 0.32.0).

Servers are started with `--worker-extension-cls` WORKER_EXTENSION. Then POST /collective_rpc (VLLM_SERVER_DEV_MODE=1)
calls METHOD in every worker, with a command for each rank, and returns each rank's answer. vLLM does nothing else
meanwhile; the server must be paused before weights come, since some requests may wait half-done.

Parameters keep their memory and their layout. On CPUs vLLM would pack them (rollout/vllm/cpu_layers.py). On GPUs only
some kernels for experts do, and these are refused. GPUs, so CUDA IPC and NCCL, were not run: they take the same code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pydantic
import torch

from megagrpo.errors import EngineError, ModelError, Problem, WeightSyncError, brief
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.plan import WeightPlan, require_own
from megagrpo.weights.transport.choice import Channel, TransportName
from megagrpo.weights.transport.disk import DiskReceiver, Post
from megagrpo.weights.transport.loader import Answer, Command, Loader, carry_out, plan_fields
from megagrpo.weights.transport.rendezvous import Member

METHOD = "megagrpo_weights"


# --- outside: one server's weights ------------------------------------------------------------------------------------


class VllmWeights:
    """One engine's weights, as the process beside its server sees them: a receiving end, and digests of what arrived.

    `manifests` are its ranks', in order. All methods need a paused server. They raise WeightSyncError with the problems
    of each rank, and EngineError if the server refuses or does not answer.
    """

    def __init__(self, post: Post, name: str, manifests: Sequence[Manifest]) -> None:
        self._post, self._name, self._manifests = post, name, manifests
        self._member: Member | None = None
        self._disk: DiskReceiver | None = None

    def connect(self, plan: WeightPlan, destinations: Sequence[int], channel: Channel) -> None:
        """Opens the receiving end. `destinations` are the plan's indices of the ranks, in order.

        Raises WeightSyncError, naming parameters, if the served model has other names, shapes or dtypes than planned.
        """
        self.close()
        for destination, manifest in zip(destinations, self._manifests, strict=True):
            require_own(plan.destinations[destination], manifest)
        self._member = channel.rendezvous.join(f"actor of {self._name}")
        parts = [plan_fields(plan, destination) for destination in destinations]
        self._ask("plan", parts, transport=channel.transport, bucket_bytes=channel.bucket_bytes)
        if channel.transport is TransportName.DISK:
            self._disk = DiskReceiver(destinations, channel.rendezvous, self._load, self._name)

    def receive(self, version: int) -> None:
        """Writes the weights of the open sync, while the training ranks send."""
        if self._disk is not None:
            self._disk.receive(version)
        else:
            self._ask("receive", version=version)

    def digests(self) -> list[Mapping[str, int]]:
        """Returns the digests of the server's weights, by rank and checkpoint tensor."""
        return self._ask("digest")

    def bucket_digests(self, tensor: str, active: Sequence[int]) -> list[Mapping[str, Mapping[str, int]]]:
        """Returns, by rank, "sent" and "arrived" digests of one checkpoint tensor by bucket; empty without buckets."""
        if self._disk is not None or self._member is None:
            return []
        return self._ask("bucket_digests", tensor=tensor, active=list(active))

    def close(self) -> None:
        """Drops this process's end. May be called twice."""
        self._member = self._disk = None

    def _load(self, directory: Path) -> None:
        self._ask("load", directory=str(directory))

    def _ask(self, action: str, parts: Sequence[Mapping[str, Any]] = (), **fields: Any) -> list[Any]:
        """Returns the ranks' answers to a command, in order. `parts` has the fields that differ between ranks."""
        if self._member is None:
            raise EngineError(Problem(f"{self._name}: {action}", given="no connection", needed="connect first"))
        fields |= {"action": action, "rendezvous": asdict(self._member.rendezvous)}
        commands = [
            {"name": manifest.holder, **fields, **part}
            for manifest, part in zip(self._manifests, parts or [{}] * len(self._manifests), strict=True)
        ]
        body = {"method": METHOD, "kwargs": {"commands": json.dumps(commands)}}
        results = self._post("/collective_rpc", body).get("results")
        try:
            answers: list[Any] = pydantic.TypeAdapter(list[pydantic.Json[Answer]]).validate_python(results, strict=True)
        except pydantic.ValidationError as error:
            needed = "the answers of megagrpo's extension: the same megagrpo in the server as here"
            raise EngineError(Problem(f"{self._name}: {action}", brief(results), needed)) from error
        if len(answers) != len(commands):
            given, needed = f"{len(answers)} ranks", f"{len(commands)}, as planned"
            raise EngineError(Problem(f"{self._name}: {action}", given, needed))
        if problems := [Problem(*problem) for answer in answers for problem in answer.get("problems", ())]:
            raise WeightSyncError(problems)
        return [answer["value"] for answer in answers]


# --- inside vLLM's workers --------------------------------------------------------------------------------------------

KEPT_LAYOUTS = ("CPU", "TRITON", "BATCHED_TRITON")
"""Kernels for experts (UnquantizedMoeBackend) that take parameters as they are loaded."""
DERIVED = (".W_UK_T", ".W_UV")
"""Parameters that vLLM makes of kv_b_proj in latent attention."""


class WeightsExtension:
    """The methods that each of vLLM's workers gets: vLLM makes this class a base of its worker class."""

    model_runner: Any
    rank: int
    _megagrpo_loader: Loader | None = None

    def megagrpo_weights(self, commands: str) -> str:
        """Carries out this rank's command of a JSON list. Returns its answer, or its problems, as JSON."""
        try:
            command = pydantic.TypeAdapter(list[Command]).validate_json(commands, strict=True)[self.rank]
        except (ValueError, IndexError) as error:
            return json.dumps({"problems": [(f"rank {self.rank}", f"no command of megagrpo: {error}", "", "")]})
        model = self.model_runner.get_model()
        self._megagrpo_loader, answer = carry_out(VllmLoader, self._megagrpo_loader, model, command)
        return json.dumps(answer)


class VllmLoader(Loader):
    """The state of one worker. It writes the tensors itself, also from disk."""

    engine = "vLLM"

    def held(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        refuse_packed(self.model)
        return {name: its for name, its in super().held(manifest).items() if not name.endswith(DERIVED)}

    def derive(self) -> None:
        derive(self.model)


def refuse_packed(model: torch.nn.Module) -> None:
    """Raises ModelError naming experts whose kernel keeps parameters in a layout of its own."""
    kernels = {
        name: backend.name
        for name, module in model.named_modules()
        if (backend := getattr(getattr(module, "quant_method", None), "unquantized_backend", None)) is not None
    }
    if packed := {name: kernel for name, kernel in kernels.items() if kernel not in KEPT_LAYOUTS}:
        (name, kernel), *_ = packed.items()
        fix = "rollout.vllm.moe_backend: triton"
        raise ModelError(Problem(name, f"experts packed for {kernel}", "a kernel that keeps their layout", fix))


@torch.no_grad()
def derive(model: torch.nn.Module) -> None:
    """Makes anew, in place, what vLLM derives from weights: W_UK_T and W_UV of latent attention, and one matrix of a
    router and of the weight of shared experts."""
    for module in model.modules():
        if hasattr(module, "W_UV"):
            module.process_weights_after_loading(module.W_UV.dtype)
        fused = getattr(module, "_combined_gate_weight", None)
        if fused is not None:
            torch.cat([module.gate.weight, module.shared_expert_gate.weight], out=fused)
