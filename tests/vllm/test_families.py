"""Logprobs of every family that vLLM serves on CPUs, against transformers', before and after updates by each transport.
The models' first weights in vLLM are meaningless: all come by updates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.rollout.vllm.arguments import config_changes
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.vllm_classes import CLASSES
from megagrpo.weights.plan import make_plan
from megagrpo.weights.sides import vllm
from megagrpo.weights.transport import WORKER_EXTENSION
from megagrpo.weights.transport.buckets import bucket_problems
from megagrpo.weights.transport.choice import Channel, TransportName, open_sender
from megagrpo.weights.transport.disk import DiskFiles
from megagrpo.weights.transport.ends import BucketSender
from megagrpo.weights.transport.rendezvous import RendezvousHost
from megagrpo.weights.transport.vllm import VllmWeights
from tests.rollout_engines import model_directory
from tests.tiny_models import LONG_ROPE, TINY_FAMILIES, YARN_ROPE, reference_logits
from tests.unit.test_weights_transport import Corrupting
from tests.vllm.in_process import SETTINGS, InProcess
from tests.vllm.servers import python
from tests.weight_streams import loaded, manifests, sync, unlike_sent

pytestmark = pytest.mark.needs("vllm")

TOLERANCE = 2e-6
PROMPTS = [[5, 6, 9, 11], [7, 3, 8]]
TOKENS = 24
BUCKET_BYTES = 20_000
SMALL = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
"""Heads of 32 columns, which vLLM's kernel on CPUs has, in families without a head_dim."""
FACTORS = [1 + index / 10 for index in range(8)]
LATENT = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1,
}  # fmt: skip
NO_TEMPERATURE = {"original_max_position_embeddings": 256, "llama_4_scaling_beta": 0.1}
"""Queries of ministral3 do not grow within 256 positions."""
CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), LATENT),
    "gemma2": {"head_dim": 32, "tie_word_embeddings": True},
    "ministral3": {"head_dim": 32, "rope_parameters": YARN_ROPE | NO_TEMPERATURE},
    "olmo3": SMALL | {"hidden_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1},
    "phi3_long": {
        **SMALL,
        "rope_parameters": {**LONG_ROPE, "short_factor": FACTORS, "long_factor": [2 * factor for factor in FACTORS]},
    },
    **dict.fromkeys(("granite", "olmo2", "phi3", "qwen2", "qwen2_tied", "qwen2_moe", "smollm3"), SMALL),
}
"""Changes of families' tiny configs; of others: heads of 32."""
VARIANTS = ("qwen2_tied", "mistral_window", "phi3_long", "qwen3_moe_mixed")
SERVED = [name for name in TINY_FAMILIES if name in CLASSES or name in VARIANTS]
TRANSPORTS = [TransportName.SHARED_MEMORY, TransportName.PROCESS_GROUP, TransportName.DISK]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    yield from started(tmp_path_factory.mktemp("vllm"), 1)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    yield from started(tmp_path_factory.mktemp("vllm"), 2)


def started(directory: Path, ranks: int) -> Iterator[InProcess]:
    path = python()
    assert path is not None
    engine = InProcess(path, directory / "log", ranks)
    yield engine
    engine.close()


class Updates:
    """Training ranks, and the ranks of an engine that they bring up to date by one transport."""

    def __init__(
        self, engine: InProcess, directory: Path, tensor: int, layout: ParallelLayout, transport: TransportName
    ) -> None:
        self.engine, arch = engine, read_architecture(directory)
        sizes = EngineLayoutConfig(tensor=tensor)
        self.held = manifests(arch, layout)
        self.plan = make_plan(self.held, [vllm.manifest(arch, sizes, rank, "float32", "cpu") for rank in range(tensor)])
        self.weights = VllmWeights(engine.post, "engine 0", self.plan.destinations)
        self.host, self.ranks = RendezvousHost("127.0.0.1", 200.0), range(tensor)
        channel = Channel(transport, self.host.rendezvous, BUCKET_BYTES)
        self.weights.connect(self.plan, self.ranks, channel)
        files = DiskFiles(directory.parent / "versions", directory, "float32")
        self.senders: list[Any] = [open_sender(channel, self.plan, source, files) for source in range(layout.ranks)]

    def send(self, version: int, directory: Path) -> None:
        tensors = loaded(directory, self.held)
        errors = sync(self.host, version, self.ranks, self.senders, tensors, [self.weights])
        assert [str(error) for error in errors] == []
        assert [its.where for its in unlike_sent(self.plan, tensors, self.weights.digests())] == []

    def close(self) -> None:
        for sender in self.senders:
            sender.close()
        self.weights.close()


def start(engine: InProcess, directory: Path, tensor: int, **more: Any) -> None:
    arguments = {"model": str(directory), "max_model_len": 32, "tensor_parallel_size": tensor, "config_format": "hf"}
    engine.post("/start", {"arguments": {**SETTINGS, **arguments, **more, "worker_extension_cls": WORKER_EXTENSION}})


def difference(engine: InProcess, directory: Path) -> float:
    """The largest difference of a sampled token's logprob from transformers', with the weights in `directory`."""
    found = engine.post("/generate", {"prompts": PROMPTS, "tokens": TOKENS})
    worst = 0.0
    for prompt, tokens, logprobs in zip(PROMPTS, found["tokens"], found["logprobs"], strict=True):
        (logits,) = reference_logits(directory, [[*prompt, *tokens]])
        expected = logits[len(prompt) - 1 : -1].log_softmax(-1)[torch.arange(len(tokens)), tokens]
        worst = max(worst, (expected - torch.tensor(logprobs)).abs().max().item())
    return worst


def follows(engine: InProcess, family: str, tensor: int, layout: ParallelLayout, root: Path) -> list[float]:
    """The differences with the model's own weights, and after each of three updates."""
    changes = CHANGES.get(family, {"head_dim": 32})
    directories = [model_directory(family, root / f"weights {seed}", seed=seed, **changes) for seed in range(4)]
    start(engine, directories[0], tensor)
    differences = []
    for version, directory, transport in zip(range(4), directories, cycle(TRANSPORTS), strict=False):
        updates = Updates(engine, directories[0], tensor, layout, transport)
        updates.send(version, directory)
        differences.append(difference(engine, directory))
        updates.close()
    return differences


def long_or_soak(families: list[str], long: tuple[str, ...]) -> list[Any]:
    """CI runs a family for each kind of parts; `make test-soak` the others."""
    marks = {name: pytest.mark.long if name in long else pytest.mark.soak for name in families}
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


ONE_OF_EACH = ("qwen2_tied", "qwen2_moe", "deepseek_v3", "gpt_oss", "gemma3_text", "glm4_moe", "smollm3")


@pytest.mark.parametrize("family", long_or_soak(SERVED, ONE_OF_EACH))
def test_logprobs_are_those_of_transformers_after_every_update(
    one_rank: InProcess, family: str, tmp_path: Path
) -> None:
    assert max(follows(one_rank, family, 1, ParallelLayout(), tmp_path)) < TOLERANCE


@pytest.mark.parametrize(
    "family",
    long_or_soak([name for name in SERVED if name not in ("olmo2", "olmo3")], ("qwen2_tied", "qwen3_moe")),
)
def test_logprobs_of_two_ranks_are_those_of_transformers(two_ranks: InProcess, family: str, tmp_path: Path) -> None:
    assert max(follows(two_ranks, family, 2, ParallelLayout(tensor=2), tmp_path)) < TOLERANCE


@pytest.mark.soak
def test_vllm_takes_other_factors_where_a_context_beyond_longropes_first_one_is_refused(
    one_rank: InProcess, tmp_path: Path
) -> None:
    directory = model_directory("phi3_long", tmp_path / "model", **CHANGES["phi3_long"])
    most = read_architecture(directory).sampled_max
    assert most == 32
    differences = [first_difference(one_rank, directory, max_model_len=tokens) for tokens in (most, most + 1)]
    assert differences[0] < TOLERANCE < 0.1 < differences[1]


@pytest.mark.long
def test_vllm_follows_neither_a_window_that_no_layer_has_nor_blocks_of_files(
    one_rank: InProcess, tmp_path: Path
) -> None:
    directory = model_directory("llama", tmp_path / "model", head_dim=32)
    config = directory / "config.json"
    as_made = json.loads(config.read_text())
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    unused = {"sliding_window": 4, "use_sliding_window": False, "quantization_config": blocks}
    config.write_text(json.dumps(as_made | unused))
    changes = config_changes(read_architecture(directory), directory, keeps_weights=False)
    start(one_rank, directory, 1, hf_overrides=changes)
    config.write_text(json.dumps(as_made))
    assert difference_after_update(one_rank, directory) < TOLERANCE


def first_difference(engine: InProcess, directory: Path, **arguments: Any) -> float:
    start(engine, directory, 1, **arguments)
    return difference_after_update(engine, directory)


def difference_after_update(engine: InProcess, directory: Path) -> float:
    updates = Updates(engine, directory, 1, ParallelLayout(), TransportName.SHARED_MEMORY)
    updates.send(0, directory)
    updates.close()
    return difference(engine, directory)


@pytest.mark.long
def test_a_wrong_byte_in_a_shard_is_named(two_ranks: InProcess, tmp_path: Path) -> None:
    directory = model_directory("qwen3", tmp_path / "model", head_dim=32)
    start(two_ranks, directory, 2)
    updates = Updates(two_ranks, directory, 2, ParallelLayout(tensor=2), TransportName.SHARED_MEMORY)
    rendezvous, tensors = updates.host.rendezvous, loaded(directory, updates.held)
    updates.senders[1] = BucketSender(updates.plan, 1, rendezvous, BUCKET_BYTES, Corrupting(rendezvous.run, nth=2))
    assert not sync(updates.host, 1, updates.ranks, updates.senders, tensors, [updates.weights])
    (wrong,) = unlike_sent(updates.plan, tensors, updates.weights.digests())
    tensor, _, holder = wrong.where.removesuffix(" after the sync").partition(" on ")
    sent: dict[str, int] = {}
    for sender, held in zip(updates.senders, tensors, strict=True):
        sent |= sender.bucket_digests(held, tensor, frozenset(updates.ranks))
    arrived = updates.weights.bucket_digests(tensor, updates.ranks)
    (found,) = [problem for of_rank in arrived for problem in bucket_problems(tensor, sent, of_rank["arrived"])]
    assert f"from train rank 1 to {holder}" in found.where
    updates.close()


def test_every_class_is_compared() -> None:
    assert CLASSES.keys() <= set(SERVED)
