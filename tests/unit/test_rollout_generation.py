"""Tokens that the embedded engine generates, against transformers' own generate and forward pass."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megagrpo.errors import EngineError, ModelError
from megagrpo.rollout.transformers_engine import TransformersEngine
from megagrpo.tokenizer import end_tokens
from megagrpo.types import Request, Sample, SamplingParams
from tests.rollout_engines import END, generate, model_directory, request, start_engine

PROMPTS = [[5], [9, 8, 3, 1, 2], [4, 4, 4], list(range(20, 37)), [100, 3]]
LONG_TAIL = SamplingParams(max_tokens=24, temperature=1.3, stop_tokens=tuple(range(8, 20)))


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory("qwen2", tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def engine(qwen2: Path) -> TransformersEngine:
    return start_engine(qwen2)


def many_requests(samples: int = 6, sampling: SamplingParams = LONG_TAIL) -> list[Request]:
    return [
        request(prompt, sampling, seed=1000 * p + s, prompt_id=str(p), index=s)
        for p, prompt in enumerate(PROMPTS)
        for s in range(samples)
    ]


def tokens_of(samples: Sequence[Sample]) -> list[list[int]]:
    return [sample.tokens.tolist() for sample in samples]


def test_the_head_gets_the_last_columns_of_prompts_in_one_piece(engine: TransformersEngine) -> None:
    seen: list[torch.Tensor] = []
    hook = engine._model.lm_head.register_forward_pre_hook(lambda head, inputs: seen.append(inputs[0]))
    generate(engine, [request(prompt, SamplingParams(max_tokens=2)) for prompt in PROMPTS])
    hook.remove()
    assert [tuple(hidden.shape[:2]) for hidden in seen] == [(len(PROMPTS), 1)] * 2
    assert all(hidden.is_contiguous() for hidden in seen)  # else torch copies the head's weights for each prompt


def assert_logprobs(
    model: torch.nn.Module, prompt: list[int], sample: Sample, temperature: float, atol: float = 1e-5
) -> None:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *sample.tokens.tolist()]])).logits[0, len(prompt) - 1 : -1]
    expected = (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(sample.tokens).long()[:, None])[:, 0]
    np.testing.assert_allclose(sample.logprobs, expected.numpy(), atol=atol, rtol=0)


def test_sampled_logprobs_are_those_of_a_full_forward_pass_after_rows_left_the_batch(
    qwen2: Path, engine: TransformersEngine
) -> None:
    model = AutoModelForCausalLM.from_pretrained(qwen2, dtype=torch.float32).eval()
    requests = many_requests()
    samples = generate(engine, requests)
    lengths = [len(sample.tokens) for sample in samples]
    assert min(lengths) < 5, "the test needs short responses"
    assert max(lengths) == 24, "the test needs long responses"
    for asked, sample in zip(requests, samples, strict=True):
        assert_logprobs(model, list(asked.tokens), sample, temperature=1.3)
        stopped = sample.tokens[-1] in (*LONG_TAIL.stop_tokens, END)
        assert sample.finish == ("stop" if stopped else "length")
        assert len(sample.tokens) == 24 or stopped
        assert not np.isin(sample.tokens[:-1], (*LONG_TAIL.stop_tokens, END)).any()
        assert (sample.tokens.dtype, sample.logprobs.dtype, sample.versions.dtype) == (np.int32, np.float32, np.int32)


def test_what_is_drawn_does_not_depend_on_batching_order_or_other_requests(
    qwen2: Path, engine: TransformersEngine
) -> None:
    requests = many_requests()
    expected = tokens_of(generate(engine, requests))
    shuffled = random.Random(0).sample(range(len(requests)), len(requests))
    for small in (start_engine(qwen2, "rollout.requests_at_once=7"), start_engine(qwen2, "rollout.requests_at_once=1")):
        samples = generate(small, [requests[i] for i in shuffled])
        assert tokens_of(samples) == [expected[i] for i in shuffled]
        assert [(s.prompt_id, s.index) for s in samples] == [
            (requests[i].prompt_id, requests[i].index) for i in shuffled
        ]
    assert tokens_of(generate(engine, requests[3:5])) == expected[3:5]
    assert len({tuple(tokens) for tokens in expected}) > 0.9 * len(expected), "seeds draw different responses"


def test_requests_with_different_sampling_share_a_call(engine: TransformersEngine) -> None:
    greedy = SamplingParams(max_tokens=5, temperature=0.0)
    mixed = [
        replace(
            asked, sampling=(LONG_TAIL, greedy, replace(greedy, max_tokens=2), replace(LONG_TAIL, max_tokens=1))[i % 4]
        )
        for i, asked in enumerate(many_requests())
    ]
    samples = generate(engine, mixed)
    assert tokens_of(samples) == [tokens_of(generate(engine, [asked]))[0] for asked in mixed]
    assert all((sample.versions == 0).all() for sample in samples)
    whole = tokens_of(generate(engine, many_requests()))
    assert tokens_of(samples)[3::4] == [tokens[:1] for tokens in whole[3::4]], "one token is the least to be asked for"


def test_stop_tokens_end_a_response_are_kept_in_it_and_left_out_of_its_text(engine: TransformersEngine) -> None:
    (free,) = generate(engine, [request(PROMPTS[1], SamplingParams(max_tokens=8, temperature=0.0))])
    assert free.finish == "length"
    stop = int(free.tokens[4])
    end = free.tokens.tolist().index(stop) + 1
    (stopped,) = generate(
        engine, [request(PROMPTS[1], SamplingParams(max_tokens=8, temperature=0.0, stop_tokens=(stop,)))]
    )
    assert stopped.tokens.tolist() == free.tokens[:end].tolist()
    assert stopped.finish == "stop"
    assert stopped.text == " ".join(f"w{token}" for token in stopped.tokens[:-1])


def test_all_end_tokens_of_the_model_and_the_tokenizer_end_a_response(tmp_path: Path) -> None:
    path = model_directory("qwen2", tmp_path, eos_token_id=None)
    greedy = [request(PROMPTS[1], SamplingParams(max_tokens=8, temperature=0.0))]
    (free,) = generate(start_engine(path), greedy)
    end = int(free.tokens[4])
    generation, config = path / "generation_config.json", path / "config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"eos_token_id": [91, end]}))
    (stopped,) = generate(start_engine(path), greedy)
    assert stopped.tokens.tolist() == free.tokens[: free.tokens.tolist().index(end) + 1].tolist()
    assert stopped.finish == "stop"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"text_config": {"eos_token_id": 90}}))
    assert end_tokens(path, SimpleNamespace(eos_token_id=92)) == {90, 91, end, 92}


def test_logits_that_are_not_finite_are_an_error_that_names_the_sample_and_the_weights(qwen2: Path) -> None:
    broken = start_engine(qwen2)
    weight = broken._model.get_output_embeddings().weight
    for value in (float("nan"), float("inf"), 1e38):
        with torch.no_grad():
            weight[7] = value
        with pytest.raises(EngineError, match=r"sample 0 of prompt p.* version 0: token 1 of its response(.|\n)*lr"):
            generate(broken, [request([3, 4], SamplingParams(max_tokens=4, temperature=1e-3), prompt_id="p")])


def test_no_requests_give_no_samples_and_an_empty_prompt_is_refused(engine: TransformersEngine) -> None:
    assert generate(engine, []) == []
    with pytest.raises(EngineError, match="no tokens"):
        generate(engine, [request([], LONG_TAIL)])


def test_a_model_without_a_tensor_or_a_tokenizer_is_refused(qwen2: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((qwen2 / name).read_bytes())
    with pytest.raises(ModelError, match="tokenizer"):
        start_engine(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        start_engine(tmp_path)
