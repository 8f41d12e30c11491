"""Training ranks that bring an engine up to date, and what transformers says of samples by the same weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megagrpo.errors import MegagrpoError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.types import Request, Sample
from megagrpo.weights.families import read_architecture
from megagrpo.weights.plan import make_plan
from megagrpo.weights.transport.choice import Channel, TransportName, open_sender
from megagrpo.weights.transport.disk import DiskFiles
from megagrpo.weights.transport.rendezvous import RendezvousHost
from tests.tiny_models import reference_model
from tests.weight_streams import loaded, manifests, sync, two_nodes, unlike_sent
from tests.weights_oracle import Tensors

WAIT_SECONDS = 240.0
"""A deadline that only ends a test that hangs: a busy machine may take fifty times what an idle one takes."""
BUCKET_BYTES = 30_000


class Policy:
    """Training ranks of a layout, in threads, and one engine that they bring up to date. `served` has the directory of
    the model; `files` is for DISK."""

    def __init__(
        self,
        engine: Any,
        served: Any,
        layout: ParallelLayout,
        transport: TransportName,
        timeout_seconds: float = WAIT_SECONDS,
        files: DiskFiles | None = None,
    ) -> None:
        self.engine, self.layout, self.served = engine, layout, served
        self.arch = read_architecture(served.directory)
        ends = manifests(self.arch, layout), engine.manifests()
        hops = two_nodes(*map(len, ends)) if transport is TransportName.TWO_HOPS else None
        self.plan = make_plan(*ends, hops)
        self.host = RendezvousHost("127.0.0.1", timeout_seconds)
        self.ranks = range(len(self.plan.destinations))
        self.channel = Channel(transport, self.host.rendezvous, BUCKET_BYTES)
        engine.connect(self.plan, self.ranks, self.channel)
        self.senders: list[Any] = [open_sender(self.channel, self.plan, i, files) for i in range(layout.ranks)]

    def held(self, directory: Path) -> list[Tensors]:
        return loaded(directory, manifests(self.arch, self.layout))

    def move(self, version: int, directory: Path) -> list[MegagrpoError]:
        """Between begin_update and end_update. The errors of training ranks, and then the engine's."""
        return sync(self.host, version, self.ranks, self.senders, self.held(directory), [self.engine])

    def wrong(self, directory: Path, arrived: list[dict[str, int]]) -> list[str]:
        return [problem.where for problem in unlike_sent(self.plan, self.held(directory), arrived)]

    def send(self, version: int, directory: Path) -> None:
        """Between begin_update and commit_update: every tensor of `directory` into the engine, and compared."""
        assert [str(error) for error in self.move(version, directory)] == []
        assert self.wrong(directory, self.engine.end_update(version)) == []

    def sync(self, version: int, directory: Path) -> None:
        self.engine.begin_update(version)
        self.send(version, directory)
        self.engine.commit_update(version)

    def close(self) -> None:
        for sender in self.senders:
            sender.close()


# --- what transformers says -------------------------------------------------------------------------------------------


@cache
def model_of(directory: Path) -> torch.nn.Module:
    return reference_model(directory)


@torch.no_grad()
def logits_of(directory: Path, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """[tokens, vocab], before each token of a response, in float32."""
    return model_of(directory)(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]


def difference(directory: Path, asked: Request, sample: Sample) -> np.ndarray:
    """[tokens], of the engine's logprobs from those that transformers gives with the weights in `directory`."""
    tokens = sample.tokens.tolist()
    logits = logits_of(directory, asked.tokens, tokens) / (asked.sampling.temperature or 1.0)
    expected = logits.log_softmax(-1)[torch.arange(len(tokens)), tokens].numpy()
    return np.abs(sample.logprobs - expected)


def check_logprobs(samples: list[Sample], asked: list[Request], directories: Mapping[int, Path]) -> None:
    """Each token has the logprob that transformers gives it with the weights of its version."""
    for sample, one in zip(samples, asked, strict=True):
        for version in {int(version) for version in sample.versions}:
            assert difference(directories[version], one, sample)[sample.versions == version].max() < 1e-5
