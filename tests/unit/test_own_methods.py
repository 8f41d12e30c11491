"""Advantages and losses of a user's own, from FILE.py:FUNCTION to the numbers that a run trains on."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megagrpo.algorithm.advantage_method import AdvantageInputs
from megagrpo.algorithm.policy_losses import PolicyInputs
from megagrpo.algorithm.ragged import ragged_zeros
from megagrpo.cli import main
from megagrpo.errors import EXIT_USER_ERROR, RecipeError
from megagrpo.recipe.defaults import with_absolute_directories
from megagrpo.trainer.schedule import Live, grpo_step
from megagrpo.user_functions import load_function
from tests.methods import advantage, loss, sequences_of
from tests.step_fakes import make_run
from tests.tiny_run import make_run as write_run
from tests.tiny_run import recipe_with

METHODS = """
import numpy as np

from megagrpo.algorithm.policy_losses import PolicyLoss

def centered(inputs, scale=1.0):
    return scale * (inputs.scores - np.nanmean(inputs.scores))

def short(inputs):
    return inputs.scores[1:]

def words(inputs):
    return ["a"] * len(inputs.scores)

def nothing(inputs):
    return inputs.scores * float("nan")

def surprising(inputs, scale=1.0):
    mean = np.nanmean(inputs.scores)
    surprise = [-scale * inputs.logprobs.row(row) for row in range(len(inputs.scores))]
    return [(score - mean) * each for score, each in zip(inputs.scores, surprise)]

def unlike(inputs):
    return [np.ones(tokens) for tokens in (2, 3, 0, 5)]

def few(inputs):
    return [np.ones(2)]

def infinite(inputs):
    return [[1.0, float("inf")], [1.0, 1.0, 1.0], [], [1.0]]

def of_end(inputs):
    return (inputs.token_ids.values[inputs.token_ids.offsets[1:] - 1] > 2).astype(float)

def fails(inputs):
    raise ValueError("no idea")

def plain(inputs):
    return -inputs.advantages * inputs.log_ratio().exp()

def whole(inputs):
    ratio = inputs.log_ratio().exp()
    return PolicyLoss(-inputs.advantages * ratio, ratio.detach(), ratio < 0.9, ratio > 1.1)

def summed(inputs):
    return plain(inputs).sum()
"""
TOKEN_COUNTS = np.array([2, 3, 0, 1])
INPUTS = AdvantageInputs(
    np.array([1.0, 0.0, np.nan, 5.0]),
    np.array([0, 0, 0, 1]),
    TOKEN_COUNTS,
    logprobs=ragged_zeros(TOKEN_COUNTS).with_values(-np.arange(1.0, 7.0)),
)
LOGPROBS = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
TOKENS = PolicyInputs(
    LOGPROBS,
    torch.tensor([-1.2, -1.5, -0.5]),
    torch.tensor([1.0, -1.0, 2.0]),
    sequences_of([3]),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "methods.py"
    path.write_text(METHODS)
    return path


def test_an_advantage_gets_its_arguments_and_masked_samples_get_nothing(file: Path) -> None:
    found = advantage(name=f"{file}:centered", arguments={"scale": 0.5}).advantages(INPUTS)
    np.testing.assert_array_equal(found.of_rows, [-0.5, -1.0, 0.0, 1.5])


def test_an_advantage_may_give_every_token_its_own(file: Path) -> None:
    found = advantage(name=f"{file}:surprising", arguments={"scale": 2.0}).advantages(INPUTS)
    np.testing.assert_array_equal(found.of_tokens.values, [-2, -4, -12, -16, -20, 36])
    np.testing.assert_array_equal(found.of_tokens.offsets, [0, 2, 5, 5, 6])
    np.testing.assert_array_equal(found.of_rows, [-3, -16, 0, 36])


@pytest.mark.parametrize(
    ("name", "given", "needed"),
    [
        ("unlike", "float64 [5] for row 3, sample 0 of group 1", "its 1 tokens: float64 [1]"),
        ("few", "1 arrays", "one for each of the 4 rows"),
        ("infinite", "not finite for row 0, sample 0 of group 0", "finite advantages"),
    ],
)
def test_an_advantage_by_token_that_does_not_fit_is_refused_with_its_sample(
    file: Path, name: str, given: str, needed: str
) -> None:
    with pytest.raises(RecipeError) as raised:
        advantage(name=f"{file}:{name}").advantages(INPUTS)
    (problem,) = raised.value.problems
    assert given in problem.given
    assert needed in problem.needed


def test_a_run_gives_it_tokens_and_logprobs_and_trains_on_values_by_token(file: Path) -> None:
    scores = lambda prompt: [1.0, 0.0, 0.0, 0.0]  # noqa: E731
    run = make_run(f"algorithm.advantage={file}:surprising", scores=scores)
    grpo_step(run, Live(run), 1, 0.0)
    np.testing.assert_allclose(run.policy.advantages.values[:5], [0.75, 0.75, -0.25, -0.25, -0.25])
    run = make_run(f"algorithm.advantage={file}:of_end", scores=scores)
    grpo_step(run, Live(run), 1, 0.0)
    np.testing.assert_array_equal(run.policy.advantages[:4], [0, 0, 1, 1])  # the tokens of a sample are 0, 1, 2, ...
    run = make_run(f"algorithm.advantage={file}:surprising", "algorithm.loss=gmpo", scores=scores)
    with pytest.raises(RecipeError, match="gmpo, with advantages by token"):
        grpo_step(run, Live(run), 1, 0.0)


def test_a_run_trains_on_it(file: Path) -> None:
    run = make_run(f"algorithm.advantage={file}:centered", scores=lambda prompt: [1.0, 0.0, 0.0, 0.0])
    grpo_step(run, Live(run), 1, 0.0)
    np.testing.assert_allclose(run.policy.advantages[:4], [0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("name", ["plain", "whole"])
def test_a_loss_is_that_of_its_formula_with_its_gradient(file: Path, name: str) -> None:
    found, expected = (loss(name=each).of_tokens(TOKENS) for each in (f"{file}:{name}", "ppo_clip"))
    inside = ~(expected.clipped_low | expected.clipped_high)
    torch.testing.assert_close(found.loss[inside], expected.loss[inside], rtol=0, atol=0)
    torch.testing.assert_close(found.ratio, expected.ratio, rtol=0, atol=0)
    (gradient,) = torch.autograd.grad(found.loss.sum(), LOGPROBS)
    torch.testing.assert_close(gradient, -TOKENS.advantages * found.ratio)
    assert bool(found.clipped_high.any()) == (name == "whole")
    assert not found.ratio.requires_grad


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("none.py:f", {}),
        ("methods.py:centered", {"sale": 1}),
        *((f"methods.py:{name}", {}) for name in ("absent", "np", "short", "words", "nothing", "fails")),
    ],
)
def test_an_advantage_that_cannot_be_used_is_an_error_of_the_recipe(file: Path, name: str, arguments: dict) -> None:
    with pytest.raises(RecipeError) as raised:
        advantage(name=str(file.with_name(name)), arguments=arguments).advantages(INPUTS)
    assert [problem.where for problem in raised.value.problems] == ["algorithm.advantage.name"]


@pytest.mark.parametrize("name", ["summed", "words_", "nothing_"])
def test_a_loss_that_cannot_be_used_is_an_error_of_the_recipe(file: Path, name: str) -> None:
    with file.open("a") as opened:
        opened.write("\ndef words_(inputs):\n    return 'a'\n")
    with pytest.raises(RecipeError, match=r"algorithm\.loss\.name"):
        loss(name=f"{file}:{name}").of_tokens(TOKENS)


def test_a_broken_file_ends_the_plan_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_run(tmp_path)
    (tmp_path / "broken.py").write_text("def f(inputs):\n    return (\n")
    code = main(["plan", str(recipe), f"algorithm.loss={tmp_path}/broken.py:f", "algorithm.advantage=gone.py:f"])
    assert code == EXIT_USER_ERROR
    printed = capsys.readouterr().err
    assert "algorithm.loss" in printed
    assert "(line 2)" in printed
    assert "gone.py, which does not exist" in printed
    (tmp_path / "broken.py").write_text("raise GeneratorExit('\x1b[31m')\n")
    assert main(["plan", str(recipe), f"algorithm.advantage={tmp_path}/broken.py:f"]) == EXIT_USER_ERROR
    assert r"GeneratorExit: \x1b[31m (line 1)" in capsys.readouterr().err


def test_training_ranks_get_the_absolute_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = with_absolute_directories(recipe_with("algorithm.loss=mine.py:f"))
    assert recipe.algorithm.loss.name == f"{tmp_path}/mine.py:f"


def test_a_microbatch_without_tokens_is_one_of_no_losses(file: Path) -> None:
    nothing = torch.zeros(0)
    inputs = replace(TOKENS, logprobs=nothing, old_logprobs=nothing, advantages=nothing)
    assert loss(name=f"{file}:plain").of_tokens(inputs).loss.shape == (0,)


def test_nothing_is_written_beside_the_file_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "beside_of_mine.py").write_text("ONE = 1\n")
    (tmp_path / "mine.py").write_text("import beside_of_mine\ndef one(): return beside_of_mine.ONE\n")
    assert load_function(f"{tmp_path}/mine.py:one", "here", RecipeError)() == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["beside_of_mine.py", "mine.py"]
    assert not sys.dont_write_bytecode
