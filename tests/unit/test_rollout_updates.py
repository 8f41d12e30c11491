"""Weights into the embedded engine: the order of calls, digests of what arrived, and what is sampled afterwards."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megagrpo.errors import EngineError
from megagrpo.rollout.engine import Engine, EngineState, UpdateProtocol
from megagrpo.types import SamplingParams
from megagrpo.weights.digest import digests
from megagrpo.weights.plan import make_plan
from megagrpo.weights.sides import checkpoint
from megagrpo.weights.transport.choice import Channel, TransportName, open_sender
from megagrpo.weights.transport.rendezvous import RendezvousHost
from tests.rollout_engines import model_directory, request, start_engine

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
ASKED = [request([5, 6, 7, 8], GREEDY)]


@pytest.mark.parametrize("family", ["qwen2_tied", "qwen3_moe", "deepseek_v3"])
def test_received_weights_are_digested_and_then_sampled_from(family: str, tmp_path: Path) -> None:
    old, new = model_directory(family, tmp_path / "old", seed=0), model_directory(family, tmp_path / "new", seed=1)
    engine: Engine = start_engine(old)
    (before,) = engine.generate(ASKED)

    (source,) = checkpoint.manifests(new)
    tensors = load_file(new / "model.safetensors")
    plan = make_plan([source], engine.manifests())
    host = RendezvousHost("127.0.0.1", timeout_seconds=200)
    channel = Channel(TransportName.SHARED_MEMORY, host.rendezvous, bucket_bytes=4096)
    sender = open_sender(channel, plan, 0)
    engine.connect(plan, [0], channel)
    host.open(3, [0])
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, 3, tensors)
        engine.begin_update(3)
        engine.receive(3)
        sending.result()
    assert engine.end_update(3) == [digests(tensors, source.placements)]
    (buckets,) = engine.bucket_digests("model.norm.weight", [0])
    of_sender = sender.bucket_digests(tensors, "model.norm.weight", frozenset([0]))
    assert of_sender
    assert buckets == {"sent": {}, "arrived": of_sender}
    engine.commit_update(3)
    sender.close()

    (after,) = engine.generate(ASKED)
    model = AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32)
    expected = model.generate(torch.tensor([ASKED[0].tokens]), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert after.tokens.tolist() == expected[0, 4:].tolist()
    assert after.tokens.tolist() != before.tokens.tolist()
    assert (after.versions == 3).all()


def test_nothing_is_generated_from_open_or_unverified_weights_nor_after_closing(tmp_path: Path) -> None:
    engine = start_engine(model_directory("qwen2", tmp_path))
    engine.begin_update(1)
    with pytest.raises(EngineError, match="receiving weights"):
        engine.generate(ASKED)
    with pytest.raises(EngineError, match="connect first"):
        engine.receive(1)
    engine.end_update(1)
    with pytest.raises(EngineError, match="unverified"):
        engine.generate(ASKED)
    engine.commit_update(1)
    engine.generate(ASKED)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate(ASKED)


@pytest.mark.parametrize(
    "calls",
    [
        [lambda p: p.check_receiving()],
        [lambda p: p.end(1)],
        [lambda p: p.commit(1)],
        [lambda p: p.begin(1), lambda p: p.commit(1)],
        [lambda p: p.begin(1), lambda p: p.end(2)],
        [lambda p: p.begin(1), lambda p: p.end(1), lambda p: p.check_receiving()],
        [lambda p: p.begin(1), lambda p: p.end(1), lambda p: p.end(1)],
        [lambda p: p.begin(1), lambda p: p.end(1), lambda p: p.commit(2)],
        [lambda p: p.begin(2), lambda p: p.end(2), lambda p: p.commit(2), lambda p: p.begin(1)],
        [lambda p: p.close(), lambda p: p.begin(1)],
        [lambda p: p.close(), lambda p: p.lose_weights()],
        [lambda p: p.lose_weights(), lambda p: p.check_serving()],
        [lambda p: p.lose_weights(), lambda p: p.commit(0)],
    ],
)
def test_calls_out_of_turn_are_refused_and_change_nothing(calls: list[Callable[[UpdateProtocol], None]]) -> None:
    protocol = UpdateProtocol("engine 0")
    for call in calls[:-1]:
        call(protocol)
    before = (protocol.state, protocol.version, protocol.incoming)
    with pytest.raises(EngineError, match="engine 0"):
        calls[-1](protocol)
    assert (protocol.state, protocol.version, protocol.incoming) == before


def test_a_failed_update_is_begun_again_and_its_version_never_counted() -> None:
    protocol = UpdateProtocol("engine 0")
    protocol.begin(1)
    protocol.begin(1)  # a bucket was lost
    protocol.end(1)
    protocol.begin(1)  # the digests differed
    assert (protocol.state, protocol.version) == (EngineState.RECEIVING, 0)
    protocol.end(1)
    protocol.commit(1)
    assert (protocol.state, protocol.version) == (EngineState.SERVING, 1)
