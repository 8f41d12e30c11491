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
from pathlib import Path
from typing import Any

import pydantic
import torch

from megagrpo.errors import EngineError, ModelError, Problem, brief
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.transport.loader import Answer, Command, Loader, ServedWeights, carry_out
from megagrpo.weights.transport.rendezvous import Member

METHOD = "megagrpo_weights"


# --- outside: one server's weights ------------------------------------------------------------------------------------


class VllmWeights(ServedWeights):
    """The weights of one vLLM server, which must be paused."""

    def load(self, directory: Path) -> None:
        self.ask("load", directory=str(directory))

    def answers(self, action: str, commands: Sequence[Mapping[str, Any]], member: Member) -> list[Any]:
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
        return answers


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
    """Raises ModelError naming experts whose kernel keeps parameters in a layout of its own, or a parameter that vLLM
    dropped when it packed it."""
    kernels = {
        name: backend.name
        for name, module in model.named_modules()
        if (backend := getattr(getattr(module, "quant_method", None), "unquantized_backend", None)) is not None
    }
    if packed := {name: kernel for name, kernel in kernels.items() if kernel not in KEPT_LAYOUTS}:
        (name, kernel), *_ = packed.items()
        fix = "rollout.vllm.moe_backend: triton (--moe-backend triton of a server that runs already)"
        raise ModelError(Problem(name, f"experts packed for {kernel}", "a kernel that keeps their layout", fix))
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            needed, fix = "a server that a run starts: others drop it on CPUs", "rollout.engine: vllm"
            raise ModelError(Problem(name, "packed by vLLM, and dropped", needed, fix))


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
