"""Logprobs of every family that vLLM serves on CPUs, against transformers', before and after updates by each transport.
The models' first weights in vLLM are meaningless: all come by updates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.rollout.vllm.arguments import config_changes
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.families import read_architecture
from megagrpo.weights.families.vllm_classes import CLASSES
from megagrpo.weights.sides import vllm
from megagrpo.weights.transport import WORKER_EXTENSION
from megagrpo.weights.transport.choice import TransportName
from megagrpo.weights.transport.disk import DiskFiles
from megagrpo.weights.transport.vllm import VllmWeights
from tests.engines.policy import Policy
from tests.engines.servers import vllm_python
from tests.engines.test_weights import check_wrong_byte_is_named
from tests.rollout_engines import model_directory
from tests.tiny_models import LONG_ROPE, TINY_FAMILIES, YARN_ROPE, reference_logits
from tests.vllm.in_process import SETTINGS, InProcess

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
    path = vllm_python()
    assert path is not None
    engine = InProcess(path, directory / "log", ranks)
    yield engine
    engine.close()


class Weights(VllmWeights):
    """The weights of an engine without a server, which is never paused: an engine for Policy."""

    def __init__(self, engine: InProcess, directory: Path, tensor: int) -> None:
        arch, sizes = read_architecture(directory), EngineLayoutConfig(tensor=tensor)
        self.held = [vllm.manifest(arch, sizes, rank, "float32", "cpu") for rank in range(tensor)]
        super().__init__(engine.post, "engine 0", self.held)

    def manifests(self) -> list[Manifest]:
        return self.held

    def begin_update(self, version: int) -> None:
        """Does nothing, as commit_update."""

    def commit_update(self, version: int) -> None: ...

    def end_update(self, version: int) -> Any:
        return self.digests()


@dataclass(frozen=True)
class Models:
    """Models of one family with other random weights, by seed. The engine is started with the first."""

    family: str
    root: Path

    def weights(self, seed: int) -> Path:
        changes = CHANGES.get(self.family, {"head_dim": 32})
        return model_directory(self.family, self.root / f"weights {seed}", seed=seed, **changes)

    @property
    def directory(self) -> Path:
        return self.root / "weights 0"


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


@contextmanager
def policy_of(
    engine: InProcess, models: Models, tensor: int, layout: ParallelLayout, transport: TransportName
) -> Iterator[Policy]:
    """Training ranks, and the ranks of an engine that they bring up to date by one transport."""
    weights = Weights(engine, models.directory, tensor)
    files = DiskFiles(models.root / "versions", models.directory, "float32")
    policy = Policy(weights, models, layout, transport, files=files)
    yield policy
    policy.close()
    weights.close()


def follows(engine: InProcess, family: str, tensor: int, layout: ParallelLayout, root: Path) -> list[float]:
    """The differences with the model's own weights, and after each of three updates."""
    models, differences = Models(family, root), []
    start(engine, models.weights(0), tensor)
    for version, transport in zip(range(4), cycle(TRANSPORTS), strict=False):
        with policy_of(engine, models, tensor, layout, transport) as policy:
            policy.sync(version, models.weights(version))
            differences.append(difference(engine, models.weights(version)))
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
    models = Models("phi3_long", tmp_path)
    most = read_architecture(models.weights(0)).sampled_max
    assert most == 32
    differences = [first_difference(one_rank, models, max_model_len=tokens) for tokens in (most, most + 1)]
    assert differences[0] < TOLERANCE < 0.1 < differences[1]


@pytest.mark.long
def test_vllm_follows_neither_a_window_that_no_layer_has_nor_blocks_of_files(
    one_rank: InProcess, tmp_path: Path
) -> None:
    models = Models("llama", tmp_path)
    directory = models.weights(0)
    config = directory / "config.json"
    as_made = json.loads(config.read_text())
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    unused = {"sliding_window": 4, "use_sliding_window": False, "quantization_config": blocks}
    config.write_text(json.dumps(as_made | unused))
    changes = config_changes(read_architecture(directory), directory, keeps_weights=False)
    start(one_rank, directory, 1, hf_overrides=changes)
    config.write_text(json.dumps(as_made))
    assert difference_after_update(one_rank, models) < TOLERANCE


def first_difference(engine: InProcess, models: Models, **arguments: Any) -> float:
    start(engine, models.directory, 1, **arguments)
    return difference_after_update(engine, models)


def difference_after_update(engine: InProcess, models: Models) -> float:
    with policy_of(engine, models, 1, ParallelLayout(), TransportName.SHARED_MEMORY) as policy:
        policy.sync(0, models.directory)
        return difference(engine, models.directory)


@pytest.mark.long
def test_a_wrong_byte_in_a_shard_is_named(two_ranks: InProcess, tmp_path: Path) -> None:
    models = Models("qwen3", tmp_path)
    start(two_ranks, models.weights(0), 2)
    with policy_of(two_ranks, models, 2, ParallelLayout(tensor=2), TransportName.SHARED_MEMORY) as policy:
        check_wrong_byte_is_named(policy, policy.engine)


def test_every_class_is_compared() -> None:
    assert CLASSES.keys() <= set(SERVED)
