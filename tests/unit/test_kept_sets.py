"""Kept sets from engines to training ranks: who asks for them, what engines send, how they are cut and checked."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from megagrpo.errors import EngineError
from megagrpo.rollout.requests import after_begun, evaluation_requests, training_requests
from megagrpo.rollout.sglang.client import SglangAnswer, generate_body
from megagrpo.trainer.step import train_sequences
from megagrpo.trainer.step_metrics import rollout_metrics
from megagrpo.types import AgentRun, Branch, Group, KeptSets, Prompt, Sample, SamplingParams, Score, Turn
from tests.rollout_engines import generate, model_directory, request, start_engine
from tests.tiny_run import recipe_with
from tests.unit.test_rollout_updates import begun

LISTS = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=6, unique=True), max_size=8)
NUCLEUS = SamplingParams(30, temperature=0.5, top_p=0.6, top_k=20, min_p=0.3, kept_sets=True)
PROMPT = Prompt("p0", (1, 2, 3), "sums", "4")


def kept_of(sets: list[list[int]]) -> KeptSets:
    return KeptSets.of([np.array(one) for one in sets])


def listed(kept: KeptSets | None) -> list[list[int]]:
    assert kept is not None
    ends = [0, *kept.ends.tolist()]
    return [kept.ids[a:b].tolist() for a, b in pairwise(ends)]


@given(LISTS, LISTS, st.data())
def test_sets_are_cut_and_joined_as_lists_are(first: list[list[int]], second: list[list[int]], data: Any) -> None:
    end = data.draw(st.integers(0, len(first)))
    begin = data.draw(st.integers(0, end))
    assert listed(kept_of(first).part(begin, end)) == [sorted(one) for one in first[begin:end]]
    whole = KeptSets.joined([(kept_of(first), len(first)), (None, 2), (kept_of(second), len(second))])
    assert listed(whole) == [*map(sorted, first), [], [], *map(sorted, second)]
    assert whole.ids.dtype == np.int32
    whole.require(np.array([*(one[-1] for one in first), 5, 6, *(one[0] for one in second)]), "here")


@pytest.mark.parametrize(
    ("tokens", "kept", "given"),
    [
        ([3, 4, 5], kept_of([[3], [4, 9], [4, 6]]), "2 kept ids of token 3 of the response without the sampled one, 5"),
        ([3, 4], kept_of([[3], [4, 9], [4, 6]]), "kept sets of 3 tokens"),
        ([3, 4, 5], KeptSets(np.array([3, 4, 5], np.int32), np.array([1, 2, 4])), "kept sets of 3 tokens"),
        ([3, 4, 5], KeptSets(np.array([3, 4, 5], np.int32), np.array([2, 1, 3])), "kept sets of 3 tokens"),
    ],
)
def test_sets_that_are_not_those_of_the_tokens_are_errors_that_name_sample_and_position(
    tokens: list[int], kept: KeptSets, given: str
) -> None:
    nothing = np.zeros(len(tokens), np.float32)
    sample = Sample("p0", 7, np.array(tokens, np.int32), nothing, nothing.astype(np.int32), "stop", "", kept=kept)
    with pytest.raises(EngineError, match=f"(?s)sample 7 of prompt p0.*{given}"):
        train_sequences([Group(PROMPT, (sample,))], np.ones(1, bool))


def test_branches_get_the_sets_of_their_own_tokens() -> None:
    """The second branch continues the first turn, which is trained in the first."""
    first = Branch(np.array([1, 2, 10, 11, 3, 12], np.int32), np.array([0, 0, 1, 1, 0, 1], bool))
    second = Branch(np.array([1, 2, 10, 11, 4, 13, 14, 9], np.int32), np.array([0, 0, 0, 0, 0, 1, 1, 0], bool))
    run = AgentRun((first, second), (Turn(0, 0, 2), Turn(1, 0, 1), Turn(2, 1, 2)), ())
    tokens = np.arange(10, 15, dtype=np.int32)
    kept = kept_of([[token, token + 20] for token in tokens])
    sample = Sample("p0", 0, tokens, np.zeros(5, np.float32), np.zeros(5, np.int32), "stop", "", run, kept=kept)
    sequences = train_sequences([Group(PROMPT, (sample,))], np.ones(1, bool))
    assert [listed(each.kept) for each in sequences] == [[[10, 30], [11, 31], [12, 32]], [[13, 33], [14, 34]]]
    metrics = rollout_metrics([Group(PROMPT, (sample,), (Score(1.0),))])
    assert [metrics[f"kept_sets/{name}"] for name in ("share", "mean", "max")] == [1.0, 2.0, 2.0]


def test_only_training_rollouts_that_are_narrowed_ask_for_sets() -> None:
    evaluated = "eval={temperature: 1.0, top_p: 0.5, sets: {main: {files: [{path: a.jsonl}]}}}"
    narrow = recipe_with("rollout.top_p=0.9", "rollout.min_p=0.1", "algorithm.advantage.name=remax", evaluated)
    *samples, greedy = training_requests(narrow, PROMPT, 1)
    assert {(one.sampling.top_p, one.sampling.min_p, one.sampling.kept_sets) for one in samples} == {(0.9, 0.1, True)}
    assert not greedy.sampling.kept_sets
    ((one,),) = evaluation_requests(narrow, narrow.eval.of_sets()["main"], [PROMPT])
    assert (one.sampling.top_p, one.sampling.min_p, one.sampling.kept_sets) == (0.5, 0.0, False)
    assert not any(one.sampling.kept_sets for one in training_requests(recipe_with(), PROMPT, 1))


# --- the embedded engine ----------------------------------------------------------------------------------------------


def nucleus(logits: torch.Tensor, sampling: SamplingParams) -> list[int]:
    """Ids by the definition of top-k, then top-p, then min-p, in float64."""
    p = (logits.double() / sampling.temperature).softmax(-1)
    ranked = p.argsort(descending=True)[: sampling.top_k].tolist()
    total, mass, kept = float(p[ranked].sum()), 0.0, []
    for token in ranked:
        if mass < sampling.top_p * total and p[token] >= sampling.min_p * p.max():
            kept.append(token)
        mass += float(p[token])
    return sorted(kept)


def test_the_embedded_engine_sends_sets_and_logprobs_over_them_also_after_it_was_lost(tmp_path: Path) -> None:
    path = model_directory("qwen2", tmp_path, eos_token_id=None)
    engine, other = start_engine(path), start_engine(path)
    asked = [request([5, 6, 7], NUCLEUS, seed=seed, index=seed) for seed in range(4)]
    plain = request([5, 6, 7], replace(NUCLEUS, kept_sets=False), index=4)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with ThreadPoolExecutor(1) as pool:
        future = begun(engine, [*asked, plain], pool)
        engine.begin_update(1)  # with the same weights
        said = engine.so_far().samples(dict(enumerate(asked)))
        engine.end_update(1)
        engine.commit_update(1)
        *whole, without = future.result(60)
    assert said
    assert without.kept is None
    resumed = generate(other, [replace(one, begun=said.get(ticket)) for ticket, one in enumerate(asked)])
    sizes = set()
    for one, sample in zip(whole, resumed, strict=True):
        assert sample.tokens.tolist() == one.tokens.tolist()
        assert listed(sample.kept) == listed(one.kept)
        with torch.no_grad():
            logits = model(torch.tensor([[5, 6, 7, *one.tokens]])).logits[0, 2:-1]
        for at, (row, token) in enumerate(zip(logits, one.tokens.tolist(), strict=True)):
            ids = nucleus(row, NUCLEUS)
            assert listed(one.kept)[at] == ids
            expected = (row[ids].double() / 0.5).log_softmax(-1)[ids.index(token)]
            assert abs(one.logprobs[at] - expected) < 1e-5
            sizes.add(len(ids))
    assert len(sizes) > 2


def test_what_was_drawn_from_the_whole_vocabulary_may_go_on_with_sets() -> None:
    one = request([5], NUCLEUS)
    nothing = np.zeros(2, np.float32)
    plain = Sample("p", 0, np.array([3, 4], np.int32), nothing, nothing.astype(np.int32), "abort", "")
    later = replace(plain, tokens=np.array([8, 9], np.int32), kept=kept_of([[8, 1], [9]]))
    assert listed(after_begun(replace(one, begun=plain), later).kept) == [[], [], [1, 8], [9]]
    assert after_begun(replace(one, begun=plain), plain).kept is None


# --- SGLang's answers -------------------------------------------------------------------------------------------------


def part(tokens: list[int], sets: list[list[int]] | None, count: int, finish: str | None = None) -> dict[str, Any]:
    entries = [[-9.0, token, None] for token in tokens]
    meta = {"completion_tokens": count, "output_token_logprobs": entries, "weight_version": "4"}
    meta |= {"finish_reason": {"type": finish}} if finish else {}
    logprobs = [-float(len(one)) for one in sets or ()]
    masks = {"output_token_sampling_mask": sets, "output_token_sampling_logprobs": logprobs}
    return {"output_ids": tokens, "meta_info": meta | (masks if sets is not None else {})}


def sample_of(*parts: dict[str, Any]) -> Sample:
    answer = SglangAnswer(replace(request((5, 6), NUCLEUS), index=3))
    for each in parts:
        answer.add(each)
    return answer.sample(lambda _tokens, _finish: "", "engine 0")


def test_an_answer_in_parts_has_the_sets_of_all_and_logprobs_over_them() -> None:
    assert generate_body(request((5,), NUCLEUS), "rid", 0, (), streams=True)["return_sampling_mask"]
    sample = sample_of(part([3, 4], [[9, 3], [4]], 2), part([5], [[8, 5, 1]], 3, "length"))
    assert listed(sample.kept) == [[3, 9], [4], [1, 5, 8]]
    assert sample.logprobs.tolist() == [-2.0, -1.0, -3.0]


def test_tokens_without_sets_of_a_request_that_was_given_up_while_it_waited_are_dropped() -> None:
    sample = sample_of(part([3, 4], [[9, 3], [4]], 2), part([5], None, 3, "abort"))
    assert (sample.tokens.tolist(), sample.finish) == ([3, 4], "abort")
    assert listed(sample.kept) == [[3, 9], [4]]


@pytest.mark.parametrize(
    ("parts", "given"),
    [
        (
            [part([3, 4], [[9, 3], [7]], 2, "length")],
            "1 kept ids of token 2 of the response without the sampled one, 4",
        ),
        ([part([3, 4], [[3], [4, 6, 4]], 2, "length")], "token 2 of the response .* twice"),
        ([part([3, 4], [[3], [-1, 4]], 2, "length")], "token 2 of the response .* negative"),
        ([part([3, 4], None, 2, "stop")], "kept sets of 0 tokens"),
        ([part([3, 4], None, 2), part([5], [[5]], 3, "length")], "kept sets of 1 tokens"),
    ],
    ids=["another token's", "an id twice", "a negative id", "none", "none in a part"],
)
def test_an_answer_with_other_sets_is_an_error_that_names_the_sample(parts: list[dict[str, Any]], given: str) -> None:
    with pytest.raises(EngineError, match=f"(?s)engine 0: sample 3 of prompt p.*{given}"):
        sample_of(*parts)
