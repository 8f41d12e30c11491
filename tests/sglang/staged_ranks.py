"""The training ranks' side of the tests of ways through SGLang's own endpoints: real Megatron ranks that send.

Not a test module, so that ranks need not import transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megagrpo.errors import MegagrpoError, Problem
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron import process
from megagrpo.megatron.model import named_tensors
from megagrpo.weights.executors.disk import DiskFiles
from megagrpo.weights.executors.meeting import Meeting
from megagrpo.weights.executors.sglang_ways import open_sender
from megagrpo.weights.executors.ways import Way
from megagrpo.weights.files.loading import load_files
from megagrpo.weights.plan import WeightPlan
from megagrpo.weights.verification import sent_digests
from tests.distributed.parity_ranks import load_model

Digests = dict[int, dict[str, int]]


@dataclass(frozen=True)
class Sending:
    """Syncs to be sent by one way, in order: version and the directory of its weights."""

    way: Way
    versions: tuple[tuple[int, Path], ...]


def send_all(
    layout: ParallelLayout,
    plan: WeightPlan,
    sendings: list[Sending],
    meeting: Meeting,
    bucket_bytes: int,
    ranks_per_engine: int,
    files: DiskFiles,
) -> dict[int, Digests | str]:
    """By version: the digests of what this rank sent, or the error that it ended with.

    Each sync begins when the meeting says "open <version>", and "sent <version>" counts who is done with it.
    """
    source = dist.get_rank()
    process.start_parallel(layout, seed=1)
    chunks, _ = load_model(sendings[0].versions[0][1], layout, torch.float32)
    tensors = named_tensors(chunks)
    member = meeting.join(f"test's rank {source}")
    found: dict[int, Digests | str] = {}
    for sending in sendings:
        sender = open_sender(
            sending.way,
            plan,
            source,
            meeting,
            bucket_bytes,
            ranks_per_engine=ranks_per_engine,
            device=torch.device("cpu"),
            files=files,
        )
        member.add(f"ready {sending.way}")
        for version, directory in sending.versions:
            load_files(directory, plan.sources[source], tensors)
            member.start_clock()
            member.wait(partial(member.hear, f"open {version}"), lambda: Problem("the test opens no sync"))
            try:
                sender.send(version, tensors)
                found[version] = sent_digests(plan, source, tensors)
            except MegagrpoError as error:
                found[version] = str(error)
            member.add(f"sent {version}")
        sender.close()
    return found
