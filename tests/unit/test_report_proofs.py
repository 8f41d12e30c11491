"""The four proofs of `megagrpo report --mismatch`: its exit codes, the first step in which something is missing, and
where the rest comes from."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megagrpo.batching.rank_batches import make_rank_batches
from megagrpo.cli import main
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.recipe.yaml12 import to_text
from megagrpo.report.mismatch import NOT_PROVEN, NOT_RECORDED, PROVEN, mismatch_report
from megagrpo.routes import Routes
from megagrpo.track.jsonl import MISMATCH_FIGURES, MISMATCH_FILE, MismatchRecord, StepProof, WorstToken
from megagrpo.trainer.batches import Sampled
from megagrpo.trainer.run import TrainRun
from megagrpo.trainer.step import Trained, train_sequences
from megagrpo.trainer.step_metrics import step_proof
from megagrpo.types import KeptSets, Prompt
from tests.step_fakes import make_run
from tests.tiny_run import tracked_recipe

TOKEN = WorstToken("sums/3", 2, 5, 11, "12+34=", "4", "6#", -0.25, -2.5, 6)
PROOF = StepProof(100, ((0, 100),), 100, 100, 100, "fp8", same_bits=True, route_differences=(0.125, 0.5, 0.25))
RECORD = MismatchRecord(1, 100, **dict.fromkeys(MISMATCH_FIGURES, 0.25), worst=(TOKEN,), proof=PROOF)


def proven(step: int, **changes: Any) -> MismatchRecord:
    return replace(RECORD, step=step, proof=replace(PROOF, versions=((step - 1, 100),), **changes))


def reported(directory: Path, capsys: pytest.CaptureFixture[str], *records: MismatchRecord) -> tuple[int, str]:
    (directory / MISMATCH_FILE).write_text("".join(f"{json.dumps(asdict(record))}\n" for record in records))
    code = main(["report", str(directory), "--mismatch"])
    return code, capsys.readouterr().out


def test_all_that_is_asked_for_is_proven_with_counts_over_all_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = reported(tmp_path, capsys, proven(1), proven(2), proven(3))
    assert code == PROVEN
    assert "weights 300 of 300 were sampled by versions 0 to 2, each verified by digest" in text
    assert "routes  300 of 300 passed the experts that their engine chose" in text
    assert "sets    300 of 300 have the set" in text
    assert "tokens  300 of 300 have a logprob" in text
    assert "NOT" not in text


@pytest.mark.parametrize(
    ("proof", "missing"),
    [("weights", {"verified": 99}), ("routes", {"routed": 99}), ("sets", {"kept": 99}), ("tokens", {})],
)
def test_what_is_missing_is_named_with_the_first_step(
    proof: str, missing: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = [proven(step, **missing) for step in (2, 3)]
    if proof == "tokens":
        lacking = [replace(record, tokens=99) for record in lacking]
    code, text = reported(tmp_path, capsys, proven(1), *lacking)
    assert code == NOT_PROVEN
    (line,) = [line for line in text.splitlines() if "NOT" in line]
    assert line.split()[:4] == [proof, "298", "of", "300"]
    assert line.endswith("NOT 2, first in step 2")


def test_what_the_recipe_does_not_ask_for_needs_no_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unasked = {"routed": None, "kept": None, "same_bits": False, "route_differences": None}
    code, text = reported(tmp_path, capsys, proven(1, **unasked))
    assert code == PROVEN
    assert "routes  not asked for: no experts" in text
    assert "sets    none needed" in text
    assert "tokens  not asked for: the engines' weights are fp8, the trainer's are not" in text
    _, text = reported(tmp_path, capsys, proven(1, **unasked), proven(2))
    assert "routes  in 1 steps, 100 of 100 passed" in text


def test_a_run_of_an_earlier_version_has_not_recorded_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    earlier = asdict(replace(RECORD, proof=None))
    del earlier["proof"]
    (tmp_path / MISMATCH_FILE).write_text(f"{json.dumps(earlier)}\n")
    assert main(["report", str(tmp_path), "--mismatch"]) == NOT_RECORDED
    assert "Not recorded in 1 steps, the first is 1" in capsys.readouterr().out
    assert reported(tmp_path, capsys, replace(RECORD, proof=None), proven(2))[0] == NOT_RECORDED
    assert reported(tmp_path, capsys, replace(RECORD, proof=None), proven(2, verified=0))[0] == NOT_PROVEN


def test_the_rest_is_told_by_layer_without_replay_and_by_its_sources(tmp_path: Path) -> None:
    values = tracked_recipe(tmp_path).model_dump(mode="json")
    values["model"]["dtype"] = "bfloat16"
    (tmp_path / "recipe.yaml").write_text(to_text(values))
    own = {"mean": 1.5, "p99": 2.5, "max": 3.5, "k3": 4.5}
    records = [proven(1, own_routes=own), proven(2, route_differences=(0.375, 0.5, 0.75)), proven(3)]
    records.append(replace(proven(4), proof=replace(PROOF, versions=((1, 25), (3, 75)))))
    (tmp_path / MISMATCH_FILE).write_text("".join(f"{json.dumps(asdict(record))}\n" for record in records))
    text, code = mismatch_report(tmp_path, 20)
    assert code == PROVEN
    rows = [line.split() for line in text.splitlines()]
    assert ["replay", "0.25", "0.25", "0.25", "0.25"] in rows
    assert ["own", "1.5", "2.5", "3.5", "4.5"] in rows
    assert "most in 1 (50.00%), 2 (37.50%), 0 (18.75%), counted from 0" in text  # means of four steps
    assert "bfloat16 rounds 65,536 times more coarsely" in text
    assert "the engine (transformers) and Megatron-Core" in text
    assert "older weights: they sampled 6.2% of the tokens, at most 2 versions before" in text


# --- a step counts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False], ids=["a whole run", "samples of another run"])
def test_a_step_counts_the_tokens_of_its_rows_on_all_ranks(whole: bool) -> None:
    """One of 4 responses of 2 to 5 tokens is left out, and another lacks routes and sets. Version 1 sampled, though no
    sync verified it."""
    run = make_run("rollout.samples_per_prompt=4", "rollout.prompts_per_step=1", scores=lambda prompt: [0.0] * 4)
    (group,) = run.rollouts.generate([Prompt("p0", (1, 2, 3), "sums", "2")], 3)
    versions = ([1, 2], [2, 2, 2], [1, 1, 1, 1], [0, 1, 2, 2, 3])
    samples = [replace(sample, versions=np.array(of)) for sample, of in zip(group.samples, versions, strict=True)]
    run.weights.verified_versions = {0, 2}
    groups, rows = [replace(group, samples=tuple(samples))], np.array([True, False, True, True])
    sequences = train_sequences(groups, rows)
    made = [replace(sequences[0])]
    for one in sequences[1:]:
        count = int(one.loss_mask.sum())
        ends = np.cumsum([0, *[3] * (count - 1)])  # the first token was drawn from the whole vocabulary
        routes = Routes.of(np.zeros((len(one.tokens) - 1, 2, 1), np.int64))
        made.append(replace(one, routes=routes, kept=KeptSets(np.zeros(ends[-1], np.int32), ends)))
    layout = ParallelLayout(data=2)
    batches = make_rank_batches(made, layout=layout, minibatches=2, tokens_per_microbatch=16, seed=0)
    updated: Any = SimpleNamespace(
        route_differences=(0.5, 0.25), own_routes=SimpleNamespace(mean=1, p99=2, max=3, k3=4)
    )
    unused: Any = None
    rollout = run.recipe.rollout.model_copy(update={"top_k": 8, "quantization": "fp8"})
    given = replace(run, recipe=run.recipe.model_copy(update={"rollout": rollout}))
    if not whole:
        given = TrainRun(given.recipe, given.total_steps, given.policy, given.clock, given.work)
    trained = Trained(rows, unused, batches, 0.0, policy=updated)
    proof = step_proof(given, Sampled(groups, groups), trained)
    assert proof == StepProof(
        tokens=11,
        versions=((0, 1), (1, 6), (2, 3), (3, 1)),
        verified=4 if whole else 0,
        routed=9,
        kept=7,
        quantization="fp8",
        same_bits=False,
        route_differences=(0.5, 0.25),
        own_routes={"mean": 1, "p99": 2, "max": 3, "k3": 4},
    )
    own: Any = SimpleNamespace(route_differences=None, own_routes=None)
    plain = step_proof(run, Sampled(groups, groups), replace(trained, policy=own))
    assert plain is not None
    assert (plain.routed, plain.kept, plain.own_routes, plain.same_bits) == (None, None, None, True)
    assert step_proof(run, Sampled(groups, groups), replace(trained, policy=None)) is None
