"""A llama that was converted to torch_dist and back, in a real SGLang server: what it samples, and one weight sync."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import pytest

from megagrpo import cli
from megagrpo.types import SamplingParams
from tests.rollout_engines import model_directory, request
from tests.sglang.servers import serve_directory
from tests.sglang.test_weights import check_holds, check_logprobs

# The second is longer than what the model's rotary embeddings were scaled from.
PROMPTS = ((5, 6, 9, 11), tuple(range(20, 110)))
ASKED = [request(prompt, SamplingParams(24), seed=seed) for seed, prompt in enumerate(PROMPTS)]


@pytest.mark.long
def test_a_converted_model_samples_what_the_original_does_and_takes_other_weights(tmp_path: Path) -> None:
    original, other = (model_directory("llama", tmp_path / f"seed{seed}", seed=seed) for seed in (0, 1))
    megatron, hugging_face = tmp_path / "torch_dist", tmp_path / "llama"
    for conversion, source, output in (
        ("hf-to-megatron", original, megatron),
        ("megatron-to-hf", megatron, hugging_face),
    ):
        assert cli.main(["convert", conversion, "--source", str(source), "--output", str(output)]) == 0
    with contextmanager(serve_directory)(hugging_face, 1, tmp_path / "llama.log") as served:
        check_logprobs(served.engine.generate(ASKED), ASKED, {0: original})
        check_holds(served.engine, original)
        with served.trained() as (engine, trainer):
            trainer.sync(1, other)
            check_holds(engine, other)
            samples = engine.generate(ASKED)
    assert all((sample.versions == 1).all() for sample in samples)
    check_logprobs(samples, ASKED, {1: other})
