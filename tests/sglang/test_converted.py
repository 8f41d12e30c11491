"""A llama, converted to torch_dist and back, in a real SGLang server: its samples, and one weight sync."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megagrpo import cli
from megagrpo.types import SamplingParams
from tests.rollout_engines import model_directory, request
from tests.sglang.servers import Served, serve_directory
from tests.sglang.test_weights import check_holds, check_logprobs

# The second is longer than what the model's rotary embeddings were scaled from.
PROMPTS: tuple[tuple[int, ...], ...] = ((5, 6, 9, 11), tuple(range(20, 110)))
TOKENS = 24
ASKED = [request(prompt, SamplingParams(TOKENS), seed=seed) for seed, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory("llama", tmp_path_factory.mktemp("original") / "llama")


@pytest.fixture(scope="module")
def converted_server(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of the original, converted to torch_dist and back."""
    root = tmp_path_factory.mktemp("converted")
    megatron, hugging_face = root / "torch_dist", root / "llama"
    for conversion, source, output in (
        ("hf-to-megatron", original, megatron),
        ("megatron-to-hf", megatron, hugging_face),
    ):
        assert cli.main(["convert", conversion, "--source", str(source), "--output", str(output)]) == 0
    yield from serve_directory(hugging_face, 1, root / "llama.log")


@pytest.mark.long
def test_a_converted_models_logprobs_are_those_of_the_original_in_transformers(
    converted_server: Served, original: Path
) -> None:
    samples = converted_server.engine.generate(ASKED)
    assert all((sample.versions == 0).all() for sample in samples)
    check_logprobs(samples, list(PROMPTS), {0: original})
    check_holds(converted_server.engine, original)


@pytest.mark.long
def test_a_converted_model_takes_other_weights(converted_server: Served, tmp_path: Path) -> None:
    other = model_directory("llama", tmp_path / "other", seed=1)
    with converted_server.trained() as (engine, trainer):
        trainer.sync(1, other)
        check_holds(engine, other)
        samples = engine.generate(ASKED)
    assert all((sample.versions == 1).all() for sample in samples)
    check_logprobs(samples, list(PROMPTS), {1: other})
