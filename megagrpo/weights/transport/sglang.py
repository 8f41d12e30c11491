"""Weights of a served model: the code inside SGLang's processes, and its callers outside.

Servers are started with `--custom-weight-loader` LOAD_FORMAT. Then POST /update_weights_from_tensor with that
load_format calls `load` in every rank, with commands in the place of tensors: SGLang gives all pipeline stages of a
tensor rank the same ones, so each stage finds its own in a list. The answer comes through the rendezvous. SGLang allows
this only between /begin_weight_update and /end_weight_update: there the parameters lie as they are loaded, so digests
are taken before the end.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import pickle
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import torch

from megagrpo.errors import REPORT, EngineError, ModelError, Problem, WeightSyncError, first_line
from megagrpo.weights.boxes import Manifest, in_groups
from megagrpo.weights.digest import combine, digests
from megagrpo.weights.files.loading import load_files
from megagrpo.weights.quantizing import dequantize
from megagrpo.weights.transport import LOAD_FORMAT
from megagrpo.weights.transport.choice import Channel, TransportName
from megagrpo.weights.transport.disk import Post, server_errors
from megagrpo.weights.transport.loader import Answer, Command, Loader, ServedWeights, carry_out
from megagrpo.weights.transport.rendezvous import Member
from megagrpo.weights.views import torch_dtype

logger = logging.getLogger(__name__)

COMMAND = "megagrpo command"
"""Name of the tensors of a request: uint8, JSON of a Command."""
COMMAND_BYTES_MAX = 2**30
"""A command may hold an engine rank's part of the plan."""


# --- outside: one server's weights ------------------------------------------------------------------------------------


class ServerWeights(ServedWeights):
    """The weights of one SGLang server. Its ranks are the tensor ranks of each pipeline stage. All methods need an
    update that is open on the server."""

    def __init__(self, post: Post, name: str, manifests: Sequence[Manifest], server_info: Mapping[str, Any]) -> None:
        super().__init__(post, name, manifests)
        self._info, self._bucket_bytes = server_info, 0

    @property
    def takes_commands(self) -> bool:
        return has_our_loader(self._info)

    def check(self, channel: Channel) -> None:
        check_verifiable(self._info, self._name, channel.transport)
        self._bucket_bytes = channel.bucket_bytes

    def digests(self) -> list[Mapping[str, int]]:
        if self.takes_commands:
            return super().digests()
        if self._disk is None or self._disk.loaded is None:
            raise EngineError(Problem(f"{self._name}: digests", given="no weights have come", needed="receive first"))
        return list(checked_digests(self._post, self._disk.loaded, self._manifests, self._bucket_bytes))

    def load(self, directory: Path) -> None:
        body = {"model_path": str(directory), "load_format": "auto", "flush_cache": False}
        self._post("/update_weights_from_disk", body)

    def answers(self, action: str, commands: Sequence[Mapping[str, Any]], member: Member) -> list[Any]:
        commands = [{**command, "answer": f"answer/{secrets.token_hex(8)}"} for command in commands]
        tensor = len(commands) // int(self._info.get("pp_size") or 1)
        body = {"serialized_named_tensors": [serialize(commands[rank::tensor]) for rank in range(tensor)]}
        self._post("/update_weights_from_tensor", body | {"load_format": LOAD_FORMAT, "flush_cache": False})
        member.start_clock()
        answers = []
        for command in commands:
            where, given = f"{command['name']}: {action}", "no answer, though its server answered"
            missing = partial(Problem, where, given, "the same megagrpo in the server as here")
            answers.append(member.wait(partial(member.read, command["answer"], Answer), missing))
            member.delete(command["answer"])
        return answers


def serialize(commands: Iterable[Mapping[str, Any]]) -> str:
    """Returns the commands of one tensor rank, by pipeline stage, as its entry of serialized_named_tensors: SGLang
    unpickles a list of names and tensors."""
    texts = (json.dumps(command).encode() for command in commands)
    named = [(COMMAND, torch.from_numpy(np.frombuffer(text, np.uint8).copy())) for text in texts]
    return base64.b64encode(pickle.dumps(named)).decode()


# --- outside: external servers ----------------------------------------------------------------------------------------


def has_our_loader(server_info: Mapping[str, Any]) -> bool:
    """Returns whether the server of this /server_info was started with LOAD_FORMAT."""
    return LOAD_FORMAT in (server_info.get("custom_weight_loader") or ())


def check_verifiable(server_info: Mapping[str, Any], name: str, transport: TransportName) -> None:
    """Raises WeightSyncError if this server cannot receive weights by `transport`, or they could not be verified."""
    if has_our_loader(server_info):
        return
    needed = f"--custom-weight-loader {LOAD_FORMAT} among the server's arguments"
    start_it = "start it with that, with megagrpo installed in its environment"
    if transport is not TransportName.DISK:
        where, given = f"{name}: weights.transfer: {transport}", "a server without megagrpo's weight loader"
        raise WeightSyncError(Problem(where, given, needed, f"{start_it}; or write weights.transfer: disk"))
    if (device := server_info.get("device")) != "cpu":
        where = f"{name}: its weights could not be verified"
        given = f"a server on {device} without megagrpo's weight loader; SGLang's own checksums there are different"
        raise WeightSyncError(Problem(where, given, needed, f"{start_it}; or let megagrpo start the engines"))


def checked_digests(
    post: Post, directory: Path, manifests: Sequence[Manifest], bucket_bytes: int
) -> list[dict[str, int]]:
    """Returns, by rank, digests of the weights of a server without our loader, proven by SGLang's /weights_checker.

    `directory` is the checkpoint that the server has loaded, `manifests` say what its ranks hold of it. The parameters
    that it must have are made anew from the files, about `bucket_bytes` at a time; their checksums are compared with
    the server's, and they are digested. Raises WeightSyncError, naming every parameter that is missing, is not planned,
    or whose checksum differs.
    """
    where = f"{manifests[0].holder}: /weights_checker"
    with server_errors(manifests[0].holder):
        answer = post("/weights_checker", {"action": "checksum"})
    ranks: list[Mapping[str, str]] = [rank["checksums"] for rank in answer["ranks"]]
    if len(ranks) != len(manifests):
        raise WeightSyncError(Problem(where, f"{len(ranks)} tensor ranks", f"{len(manifests)}, as planned"))
    rank_digests, problems = [], []
    for manifest, checksums in zip(manifests, ranks, strict=True):
        parts = []
        problems += [
            Problem(f"{manifest.holder}: {name}", "a parameter of the server", "one that the plan knows")
            for name in sorted(checksums.keys() - manifest.storages.keys())
        ]
        for part in _parts(manifest, bucket_bytes):
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
        rank_digests.append(combine(parts))
    if problems:
        raise WeightSyncError(problems)
    return rank_digests


def checksum(tensor: torch.Tensor) -> str:
    """Returns SGLang's checksum on CPUs: the first 8 bytes of the SHA-256 of the tensor's bytes (SGLang 0.5.23)."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(memoryview(data)).digest()[:8].hex()


def _parts(manifest: Manifest, part_bytes: int) -> Iterator[Manifest]:
    """Yields parts of a manifest: whole storages of at most `part_bytes` in all, but at least one storage each."""
    for group in in_groups(manifest.storages.values(), part_bytes):
        names = {storage.name: storage for storage in group}
        yield Manifest(
            manifest.holder,
            names,
            tuple(placement for placement in manifest.placements if placement.storage in names),
            tuple(fill for fill in manifest.fills if fill.storage in names),
        )


# --- inside SGLang's processes ----------------------------------------------------------------------------------------

ATTRIBUTE = "_megagrpo_weights"


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Carries out this rank's command. Writes its answer, or its error, to the rendezvous under the command's key.

    A stage of a pipeline hands a request on to the next once it is done with it itself. It receives weights in another
    thread, because senders wait for all stages.
    """
    stage = model.pp_group.rank_in_group if len(named_tensors) > 1 else 0
    try:
        _, data = named_tensors[stage]
        if data.dtype != torch.uint8 or data.numel() > COMMAND_BYTES_MAX:
            raise ValueError(f"{data.numel():,} elements of {data.dtype}")
        command = pydantic.TypeAdapter(Command).validate_json(bytes(data.cpu().numpy()), strict=True)
    except (ValueError, TypeError, IndexError) as error:  # and nowhere to answer
        logger.error("no command of megagrpo: %s", first_line(error))
        return
    if len(named_tensors) == 1 or command.action != "receive":
        _carry_out(model, command)
        return
    device = next(model.parameters()).device

    def receive() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a new thread has the first one
        _carry_out(model, command)

    threading.Thread(target=receive, daemon=True).start()


def _carry_out(model: torch.nn.Module, command: Command) -> None:
    state, answer = carry_out(SglangLoader, getattr(model, ATTRIBUTE, None), model, command)
    setattr(model, ATTRIBUTE, state)
    if state is None or state.rendezvous != command.rendezvous:
        logger.error("no rendezvous to answer in: %s", answer)
        return
    try:
        state.member.write(command.answer, answer)
    except WeightSyncError as error:  # the driver is gone; another one may come
        logger.error("%s", error)


class SglangLoader(Loader):
    """The state of one scheduler process. From disk, SGLang's own loader writes the tensors."""

    engine = "SGLang"

    def derive(self) -> None:
        if self.receiver is not None:
            derive(self.model)
        check_derived(self.model)


def derive(model: torch.nn.Module) -> None:
    """Makes anew what SGLang's own loader, which did not run, derives from weights: w_kc and w_vc of latent attention,
    and copies of zero-centred norms with 1 added."""
    if hasattr(model, "post_load_weights"):
        model.post_load_weights()
    for module in model.modules():
        if hasattr(module, "refresh_gemma_weight"):
            module.refresh_gemma_weight()


def check_derived(model: torch.nn.Module) -> None:
    """Raises ModelError naming what does not follow, bit for bit, from the weights from which SGLang derives it.

    SGLang's post_load_weights derives them from weights in bfloat16, which it makes of blocks first: of each head's
    rows of kv_b_proj, the first qk_nope_head_dim are w_kc [heads, nope, rank], and the others, transposed, are w_vc
    [heads, rank, value].
    """
    problems = []
    for name, module in model.named_modules():
        copied = getattr(module, "gemma_weight", None)
        if copied is not None and not torch.equal(copied, module.weight + 1):
            given = "it does not follow from the weight that was received"
            problems.append(Problem(f"{name}.gemma_weight", given, "SGLang's refresh_gemma_weight", REPORT))
        if getattr(module, "w_kc", None) is None:
            continue
        sizes, weight = [module.qk_nope_head_dim, module.v_head_dim], module.kv_b_proj.weight
        if weight.dtype == torch.float8_e4m3fn:
            weight = dequantize(weight, module.kv_b_proj.weight_scale_inv, torch.bfloat16)
        keys, values = weight.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
        for derived, expected in (("w_kc", keys), ("w_vc", values.transpose(1, 2))):
            if not torch.equal(getattr(module, derived), expected):
                given = "it does not follow from the kv_b_proj.weight that was received"
                needed = "SGLang's post_load_weights, after the last bucket that holds it"
                problems.append(Problem(f"{name}.{derived}", given, needed, f"{REPORT}, and SGLang's version"))
    if problems:
        raise ModelError(problems)
