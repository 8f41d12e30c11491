"""The code of weight syncs inside an engine's ranks, whatever the engine: commands come, weights arrive in place. Its
caller outside, beside the server, sends the commands.

An engine's own module (sglang.py, vllm.py) brings commands here and answers back, and derives what its engine makes of
weights. It runs in the engine's environment: standard library, numpy, torch and pydantic alone.
"""

from __future__ import annotations

import base64
import io
import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pydantic
import torch

from megagrpo.errors import EngineError, MegagrpoError, ModelError, Problem, WeightSyncError
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.digest import digests
from megagrpo.weights.files.loading import load_files
from megagrpo.weights.plan import WeightPlan, require_own
from megagrpo.weights.transport.choice import Channel, TransportName, open_receiver
from megagrpo.weights.transport.disk import DiskReceiver, Post
from megagrpo.weights.transport.ends import BucketReceiver
from megagrpo.weights.transport.rendezvous import PROBLEMS, Member, Rendezvous
from megagrpo.weights.views import model_tensors, stored_tensors

Answer = Annotated[
    dict[Literal["problems"], PROBLEMS] | dict[Literal["value"], dict[str, int] | dict[str, dict[str, int]] | None],
    pydantic.Field(min_length=1),
]
"""A rank's answer: its problems; or a value: None, digests by tensor, or digests by bucket."""

CAUGHT = (MegagrpoError, OSError, RuntimeError, ValueError, LookupError, TypeError, pickle.UnpicklingError)
"""The errors of a wrong command, model, plan or peer. An exception that leaves a rank's code ends the whole server."""

PLAN_CLASSES = {
    "megagrpo.weights.boxes": {"Box", "Fill", "Manifest", "Place", "Placement", "Storage", "Topology", "Transfer"},
    "megagrpo.weights.plan": {"ListedTransfers", "WeightPlan"},
}


@dataclass(frozen=True)
class Command:
    """The command to one rank of a server. Only some actions use the fields from `transport` on."""

    action: Literal["plan", "receive", "load", "digest", "bucket_digests"]
    name: str
    """The rank's name."""
    rendezvous: Rendezvous
    answer: str = ""
    """The key in the rendezvous under which the answer is awaited, where the request itself returns none."""
    transport: TransportName = TransportName.DISK
    bucket_bytes: int = 0
    plan: str = ""
    """A pickled WeightPlan, in base64."""
    destination: int = 0
    version: int = 0
    directory: str = ""
    tensor: str = ""
    active: frozenset[int] = frozenset()


# --- outside: one server's weights ------------------------------------------------------------------------------------


class ServedWeights(ABC):
    """One engine's weights, as the process beside its server sees them: a receiving end, and digests of what arrived.

    `manifests` are its ranks', in order. All methods need a server that does not sample. They raise WeightSyncError
    with the problems of each rank, and EngineError if the server refuses or does not answer.
    """

    def __init__(self, post: Post, name: str, manifests: Sequence[Manifest]) -> None:
        self._post, self._name, self._manifests = post, name, manifests
        self._member: Member | None = None
        self._disk: DiskReceiver | None = None

    @property
    def takes_commands(self) -> bool:
        """Returns whether the server's ranks have a Loader. Else the engine itself loads weights from disk."""
        return True

    @abstractmethod
    def answers(self, action: str, commands: Sequence[Mapping[str, Any]], member: Member) -> list[Any]:
        """Sends each rank its command. Returns the ranks' answers (Answer), in order."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Makes the server load a directory."""

    def check(self, channel: Channel) -> None:  # noqa: B027  most have nothing to check
        """Raises WeightSyncError if the server cannot receive weights by this channel."""

    def connect(self, plan: WeightPlan, destinations: Sequence[int], channel: Channel) -> None:
        """Opens the receiving end. `destinations` are the plan's indices of the ranks, in order.

        Raises WeightSyncError, naming parameters, if the served model has other names, shapes or dtypes than planned.
        """
        self.close()
        for destination, manifest in zip(destinations, self._manifests, strict=True):
            require_own(plan.destinations[destination], manifest)
        self.check(channel)
        self._member = channel.rendezvous.join(f"actor of {self._name}")
        if self.takes_commands:
            own = ((its, pickle.dumps(plan.part_for_destination(its))) for its in destinations)
            parts = [{"destination": its, "plan": base64.b64encode(part).decode()} for its, part in own]
            self.ask("plan", parts, transport=channel.transport, bucket_bytes=channel.bucket_bytes)
        if channel.transport is TransportName.DISK:
            self._disk = DiskReceiver(destinations, channel.rendezvous, self.load, self._name)

    def receive(self, version: int) -> None:
        """Writes the weights of the open sync, while the training ranks send."""
        if self._disk is not None:
            self._disk.receive(version)
        else:
            self.ask("receive", version=version)

    def digests(self) -> list[Mapping[str, int]]:
        """Returns the digests of the server's weights, by rank and checkpoint tensor."""
        return self.ask("digest")

    def bucket_digests(self, tensor: str, active: Sequence[int]) -> list[Mapping[str, Mapping[str, int]]]:
        """Returns, by rank, "sent" and "arrived" digests of one checkpoint tensor by bucket; empty without buckets."""
        if self._disk is not None or self._member is None:
            return []
        return self.ask("bucket_digests", tensor=tensor, active=list(active))

    def close(self) -> None:
        """Drops this process's end. May be called twice."""
        self._member = self._disk = None

    def ask(self, action: str, parts: Sequence[Mapping[str, Any]] = (), **fields: Any) -> list[Any]:
        """Returns the values of the ranks' answers to a command, in order. `parts` has the fields that differ between
        ranks."""
        member = self._member
        if member is None:
            raise EngineError(Problem(f"{self._name}: {action}", given="no connection", needed="connect first"))
        fields |= {"action": action, "rendezvous": asdict(member.rendezvous)}
        commands = [
            {"name": manifest.holder, **fields, **part}
            for manifest, part in zip(self._manifests, parts or [{}] * len(self._manifests), strict=True)
        ]
        answers = self.answers(action, commands, member)
        if problems := [Problem(*problem) for answer in answers for problem in answer.get("problems", ())]:
            raise WeightSyncError(problems)
        return [answer["value"] for answer in answers]


# --- inside: one rank's weights ---------------------------------------------------------------------------------------


@dataclass
class Loader(ABC):
    """The state of one rank's process between commands: its part of a plan, and the tensors that it writes.

    `receiver` is None if weights come from disk: then the plan only lists what to load or to digest.
    """

    rendezvous: Rendezvous
    member: Member
    model: torch.nn.Module
    manifest: Manifest | None = None
    tensors: Mapping[str, torch.Tensor] | None = None
    receiver: BucketReceiver | None = None

    engine: ClassVar[str]
    """The engine's name in errors."""

    @abstractmethod
    def derive(self) -> None:
        """Makes anew, or checks, what the engine derives from weights. Raises ModelError."""

    def held(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """Returns the model's weights by name."""
        return model_tensors(self.model, manifest)

    def do(self, command: Command) -> Any:
        match command.action:
            case "plan":
                return self._connect(command)
            case "receive":
                self._in_place()
                return self._buckets().receive(command.version)
            case "load":
                return load_files(Path(command.directory), *self._in_place())
            case "digest":
                manifest, tensors = self._in_place()
                self.derive()
                return digests(tensors, manifest.placements)
            case "bucket_digests":
                self._in_place()
                return self._buckets().bucket_digests(command.tensor, command.active)

    def close(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
        self.manifest = self.tensors = self.receiver = None

    def _connect(self, command: Command) -> None:
        self.close()
        channel, destination = Channel(command.transport, self.rendezvous, command.bucket_bytes), command.destination
        plan = read_plan(base64.b64decode(command.plan))
        manifest = plan.destinations[destination]
        tensors = stored_tensors(manifest, self.held(manifest))
        if channel.transport is not TransportName.DISK:
            self.receiver = open_receiver(channel, plan, destination, tensors)
        self.manifest, self.tensors = manifest, tensors

    def _in_place(self) -> tuple[Manifest, Mapping[str, torch.Tensor]]:
        """Returns the manifest and the tensors. Raises ModelError if the model now uses other memory than these."""
        if self.manifest is None or self.tensors is None:
            raise ModelError(Problem(self.member.name, "no weight plan", "one, before weights come"))
        used = self.held(self.manifest)
        moved = [name for name, tensor in self.tensors.items() if used[name].data_ptr() != tensor.data_ptr()]
        if moved:
            where = f"{self.manifest.holder}: {moved[0]}"
            raise ModelError(Problem(where, f"{self.engine} has put it elsewhere since", "the same memory always"))
        return self.manifest, self.tensors

    def _buckets(self) -> BucketReceiver:
        if self.receiver is None:
            raise ModelError(Problem(self.member.name, "weights from disk", "a transport of buckets"))
        return self.receiver


def carry_out(
    kind: type[Loader], state: Loader | None, model: torch.nn.Module, command: Command
) -> tuple[Loader | None, dict[str, Any]]:
    """Carries out a command, and returns the rank's state afterwards and its answer: a value, or problems.

    A command with another rendezvous, of a new run, begins with a state of its own.
    """
    try:
        if state is None or state.rendezvous != command.rendezvous:
            if state is not None:
                state.close()
            state = kind(command.rendezvous, command.rendezvous.join(command.name), model)
        return state, {"value": state.do(command)}
    except CAUGHT as error:
        failure = (f"{command.name}: {command.action} weights", f"{type(error).__name__}: {error}", "", "")
        reports = [astuple(problem) for problem in error.problems] if isinstance(error, MegagrpoError) else [failure]
        return state, {"problems": reports}


def read_plan(data: bytes) -> WeightPlan:
    """Returns a pickled plan. Raises pickle.UnpicklingError for anything else."""
    plan = _PlanReader(io.BytesIO(data)).load()
    if not isinstance(plan, WeightPlan):
        raise pickle.UnpicklingError(f"a weight plan is needed, not {type(plan).__name__}")
    return plan


class _PlanReader(pickle.Unpickler):
    """An unpickler of plans only. They come over HTTP: a pickle from elsewhere must not run code."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in PLAN_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a weight plan")
        return super().find_class(module, name)
