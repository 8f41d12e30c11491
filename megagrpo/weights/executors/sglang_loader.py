"""Runs inside SGLang's scheduler processes: exact shards into the served model, in place.

Servers are started with `--custom-weight-loader` LOAD_FORMAT. Then POST /update_weights_from_tensor with that
load_format calls `load` in every tensor rank, with a command where tensors are meant to be; `sglang_remote.py` writes
the commands and reads the answers, which come through the meeting. SGLang allows it between /begin_weight_update and
/end_weight_update only: there the parameters lie as they are loaded, so digests are taken before the end.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megagrpo.errors import MegagrpoError, ModelError, Problem, WeightSyncError
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.digest import digests
from megagrpo.weights.executors import streams
from megagrpo.weights.executors.meeting import Meeting, Member
from megagrpo.weights.executors.ways import IN_PLACE, Receiver, Way, open_receiver
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.verification import arrived_bucket_digests, sent_bucket_digests
from megagrpo.weights.views import stored_tensors

logger = logging.getLogger(__name__)

LOAD_FORMAT = "megagrpo.weights.executors.sglang_loader.load"
COMMAND = "megagrpo command"
"""Name of the one tensor of a request: uint8, JSON."""

ATTRIBUTE = "_megagrpo_weights"
CAUGHT = (MegagrpoError, OSError, RuntimeError, ValueError, LookupError, TypeError, pickle.UnpicklingError)
"""What a wrong command, model, plan or peer raises. Anything that leaves `load` ends the whole server."""

PLAN_CLASSES = frozenset(
    {
        ("megagrpo.weights.boxes", "Box"),
        ("megagrpo.weights.boxes", "Fill"),
        ("megagrpo.weights.boxes", "Manifest"),
        ("megagrpo.weights.boxes", "Placement"),
        ("megagrpo.weights.boxes", "Storage"),
        ("megagrpo.weights.plan", "WeightPlan"),
        ("megagrpo.weights.routes", "Listed"),
        ("megagrpo.weights.routes", "Transfer"),
        ("megagrpo.weights.topology", "Place"),
        ("megagrpo.weights.topology", "Topology"),
    }
)


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Does one command. Its answer, or its error, is said in the meeting under the command's key."""
    [(_, data)] = named_tensors
    command = json.loads(bytes(data.cpu().numpy()))
    state: _Loader | None = getattr(model, ATTRIBUTE, None)
    meeting = Meeting(**command["meeting"])
    try:
        if state is None or state.meeting != meeting:
            if state is not None:
                state.close()
            state = _Loader(meeting, meeting.join(command["name"]), model)
            setattr(model, ATTRIBUTE, state)
        answer = {"value": state.do(command)}
    except CAUGHT as error:
        answer = {"problems": _problems(command, error)}
    if state is None or state.meeting != meeting:
        logger.error("no meeting to answer in: %s", answer)
        return
    try:
        state.member.say(command["answer"], answer)
    except WeightSyncError as error:  # the driver is gone; another one may come
        logger.error("%s", error)


def read_plan(data: bytes) -> WeightPlan:
    """A pickled plan, and nothing else. Raises: pickle.UnpicklingError."""
    plan = _PlanReader(io.BytesIO(data)).load()
    if not isinstance(plan, WeightPlan):
        raise pickle.UnpicklingError(f"a weight plan is needed, not {type(plan).__name__}")
    return plan


def named_storages(model: torch.nn.Module, manifest: Manifest) -> dict[str, torch.Tensor]:
    """All parameters of the model, and those buffers that the manifest names."""
    found = {name: parameter.data for name, parameter in model.named_parameters()}
    return found | {name: buffer for name, buffer in model.named_buffers() if name in manifest.storages}


def check_derived(model: torch.nn.Module) -> None:
    """Raises ModelError naming latent attention whose w_kc and w_vc are not, bit for bit, what its kv_b_proj says.

    As SGLang's post_load_weights derives them from weights that are not quantised: of each head's rows of kv_b_proj the
    first qk_nope_head_dim, [heads, nope, rank], and the others transposed, [heads, rank, value].
    """
    problems = []
    for name, module in model.named_modules():
        if getattr(module, "w_kc", None) is None:
            continue
        sizes = [module.qk_nope_head_dim, module.v_head_dim]
        keys, values = module.kv_b_proj.weight.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
        for derived, expected in (("w_kc", keys), ("w_vc", values.transpose(1, 2))):
            if not torch.equal(getattr(module, derived), expected):
                problems.append(
                    Problem(
                        f"{name}.{derived}",
                        "not what the kv_b_proj.weight that it comes from says",
                        "SGLang's post_load_weights, after the last bucket that holds it",
                        "report it, with the version of SGLang",
                    )
                )
    if problems:
        raise ModelError(problems)


@dataclass
class _Loader:
    """What one scheduler process keeps between commands."""

    meeting: Meeting
    member: Member
    model: torch.nn.Module
    connection: _Connection | None = None

    def do(self, command: Mapping[str, Any]) -> Any:
        match command["action"]:
            case "describe":
                return {
                    name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
                    for name, tensor in self.model.named_parameters()
                }
            case "plan":
                self.close()
                self.connection = _connect(self.model, self.meeting, command)
                return None
            case "receive":
                return self._connected().receive(command["version"])
            case "digest":
                connection = self._connected()
                if connection.exact and hasattr(self.model, "post_load_weights"):
                    self.model.post_load_weights()  # SGLang's own loader, which derives w_kc and w_vc, did not run
                check_derived(self.model)
                manifest = connection.plan.destinations[connection.destination]
                return digests(connection.tensors, manifest.placements)
            case "bucket_digests":
                return self._connected().bucket_digests(command["tensor"], frozenset(command["active"]))
            case unknown:
                raise ValueError(f"no such action: {unknown}")

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection = None

    def _connected(self) -> _Connection:
        if self.connection is None:
            raise ModelError(Problem(self.member.name, "no weight plan", "one, before weights come"))
        self.connection.check_in_place(self.model)
        return self.connection


@dataclass(frozen=True)
class _Connection:
    """This rank's part of a plan, and the end of the way that carries it: none for ways that end outside this process,
    where the plan only says what must lie where.
    """

    plan: WeightPlan
    destination: int
    tensors: Mapping[str, torch.Tensor]
    bucket_bytes: int
    receiver: Receiver | None
    exact: bool
    """Whether exact shards come, past SGLang's own loader of the model."""

    def check_in_place(self, model: torch.nn.Module) -> None:
        """Raises ModelError if the model computes with other memory than what is written and digested here."""
        manifest = self.plan.destinations[self.destination]
        used = named_storages(model, manifest)
        moved = [name for name, tensor in self.tensors.items() if used[name].data_ptr() != tensor.data_ptr()]
        if moved:
            raise ModelError(
                Problem(f"{manifest.holder}: {moved[0]}", "SGLang has put it elsewhere since", "the same memory always")
            )

    def receive(self, version: int) -> None:
        if self.receiver is None:
            raise ModelError(Problem("receive in the engine's process", "a way that ends outside of it"))
        self.receiver.receive(version)

    def close(self) -> None:
        if self.receiver is not None:
            self.receiver.close()

    def bucket_digests(self, tensor: str, active: frozenset[int]) -> dict[str, dict[str, int]]:
        party = streams.destination_party(self.plan, self.destination)
        return {
            "sent": sent_bucket_digests(self.plan, party, self.tensors, tensor, active, self.bucket_bytes),
            "arrived": arrived_bucket_digests(
                self.plan, self.destination, self.tensors, tensor, active, self.bucket_bytes
            ),
        }


def _connect(model: torch.nn.Module, meeting: Meeting, command: Mapping[str, Any]) -> _Connection:
    way = Way(command["way"])
    plan = read_plan(base64.b64decode(command["plan"]))
    destination, bucket_bytes = command["destination"], command["bucket_bytes"]
    manifest = plan.destinations[destination]
    tensors = stored_tensors(manifest, named_storages(model, manifest))
    receiver = None
    if way in IN_PLACE:
        receiver = open_receiver(way, plan, destination, tensors, meeting, bucket_bytes)
    return _Connection(plan, destination, tensors, bucket_bytes, receiver, exact=way in (*IN_PLACE, Way.DIRECT))


class _PlanReader(pickle.Unpickler):
    """The plan comes over HTTP: whoever can write there must not run code by it."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in PLAN_CLASSES:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a weight plan")
        return super().find_class(module, name)


def _problems(command: Mapping[str, Any], error: Exception) -> list[list[str]]:
    if isinstance(error, MegagrpoError):
        return [[problem.where, problem.given, problem.needed, problem.fix] for problem in error.problems]
    return [[f"{command['name']}: {command['action']} weights", f"{type(error).__name__}: {error}", "", ""]]
