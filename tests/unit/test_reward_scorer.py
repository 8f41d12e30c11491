"""The scorer: weighted sums by source, over real worker processes.

Time passes for the scorer only when a test lets it, so that slow responses on a busy machine do not count as late.
"""

import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megagrpo.errors import RewardError
from megagrpo.recipe import schema
from megagrpo.recipe.reward_functions import BUILT_IN
from megagrpo.reward import workers
from megagrpo.reward.executors import Inline, waited
from megagrpo.reward.scorer import EXECUTORS, Scorer
from megagrpo.track.metrics import undocumented
from megagrpo.trainer.step_metrics import rollout_metrics
from megagrpo.types import FinishReason, Group, Prompt, Sample


class Clock:
    """The scorer's clock. It stands still, jumps past any deadline when a function reports that it hangs, or flows."""

    def __init__(self, hangs: Path) -> None:
        self.hangs = hangs
        self.now = 0.0
        self.flows_since = float("inf")

    def monotonic(self) -> float:
        if self.hangs.exists():
            self.hangs.unlink()
            self.now += 1e6
        return self.now + max(0.0, time.monotonic() - self.flows_since)

    def flow(self) -> None:
        self.flows_since = time.monotonic()


@pytest.fixture(autouse=True)
def clock(tmp_path, monkeypatch) -> Clock:
    made = Clock(tmp_path / "hangs")
    monkeypatch.setattr(workers, "time", made)
    return made


def make_group(*texts: str, ground_truth: str = "7", finish: FinishReason = "stop") -> Group:
    prompt = Prompt("a:0", (1,), "sums", ground_truth, extra_info={"index": 4})
    return Group(prompt, tuple(replace(sample_of(0, finish), index=i, text=text) for i, text in enumerate(texts)))


def sample_of(tokens=10, finish="stop"):
    return Sample("a:0", 0, np.zeros(tokens, np.int32), np.zeros(tokens), np.zeros(tokens), finish, "")


def reward_of(*functions: dict, **options) -> schema.RewardConfig:
    given = {"functions": list(functions) or [{"function": "gsm8k"}], "failed_share_max": 1.0, **options}
    return schema.RewardConfig.model_validate(given)


def scorer_of(*functions: dict, **options) -> Scorer:
    return Scorer(reward_of(*functions, **options), response_tokens_max=8)


@pytest.fixture
def make_scorer() -> Iterator[Callable[..., Scorer]]:
    with ExitStack() as stack:

        def make(*functions: dict, **options) -> Scorer:
            scorer = scorer_of(*functions, **options)
            stack.callback(scorer.close)
            return scorer

        yield make


def test_scores_are_weighted_sums_with_their_parts(make_scorer, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def mine(data_source, response, ground_truth, extra_info, bonus):\n"
        "    return {'score': extra_info['index'] + bonus, 'right': data_source == 'sums' and ground_truth == '7'}\n"
    )
    scorer = make_scorer(
        {"function": "gsm8k"},
        {"function": f"{tmp_path / 'mine.py'}:mine", "weight": 0.5, "arguments": {"bonus": 1}},
        {"function": "format", "weight": -1.0, "arguments": {"pattern": "7$"}},
        {"function": "format", "weight": 0.0, "arguments": {"pattern": "^#"}},
    )
    first, second = scorer.score([make_group("#### 7", "#### 8"), make_group("7")])
    assert [score.value for score in first.scores] == [1 + 2.5 - 1, 2.5]
    assert first.scores[0].parts == {"gsm8k": 1.0, "mine": 5.0, "mine.right": 1.0, "format": 1.0, "format_2": 1.0}
    assert (second.scores[0].value, second.prompt, len(second.samples)) == (1.5, make_group("7").prompt, 1)


SEEN = """
def sees_all(data_source, prompt, prompt_text, ground_truth, ability, extra_info, response, tokens, finish):
    seen = [data_source, prompt, prompt_text, ground_truth, ability, extra_info, response, tokens, finish]
    return {"score": 1, "seen": repr(seen), "nothing": None, "answer": response.upper()}

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **others):
    return {"score": solution_str == "b", "others": ", ".join(sorted(others))}

def longest(responses, tokens, ground_truth):
    order = sorted(responses, key=len)
    return [{"score": order.index(response), "answer": str(len(ids))} for response, ids in zip(responses, tokens)]

async def group_of_two(responses, fails=False):
    if fails: raise KeyError("x")
    return [0.5, 1.5]
"""


def test_a_function_gets_what_its_parameters_name(make_scorer, tmp_path):
    (tmp_path / "mine.py").write_text(SEEN)
    scorer = make_scorer(*({"function": f"{tmp_path / 'mine.py'}:{name}"} for name in ("sees_all", "compute_score")))
    group = make_group("a", "b", finish="length")
    message = {"role": "user", "content": "what?"}
    prompt = replace(group.prompt, messages=(message,), text="<what?>", ability="math")
    samples = tuple(replace(sample, tokens=np.array([4, 5], np.int32)) for sample in group.samples)
    (scored,) = scorer.score([replace(group, prompt=prompt, samples=samples)])
    first, second = scored.scores
    seen = ["sums", [message], "<what?>", "7", "math", {"index": 4}, "b", [4, 5], "length"]
    assert second.notes["sees_all.seen"] == repr(seen)
    assert "sees_all.nothing" not in second.notes
    assert (first.answer, second.answer) == ("A", "B")
    assert (first.parts["compute_score"], second.parts["compute_score"]) == (0, 1)
    assert second.notes["compute_score.others"] == "ability, finish, prompt, prompt_text, response, tokens"


def test_a_function_of_responses_scores_a_group_at_once(make_scorer, tmp_path):
    (tmp_path / "mine.py").write_text(SEEN)
    scorer = make_scorer({"function": f"{tmp_path / 'mine.py'}:longest"})
    whole = make_group("aaa", "a", "aa")
    given_up = replace(whole, samples=(replace(whole.samples[0], finish="abort"), *whole.samples[1:]))
    one, other = scorer.score([whole, given_up])
    assert [score.value for score in one.scores] == [2, 0, 1]
    assert [score.answer for score in one.scores] == ["0", "0", "0"]  # as many tokens
    assert [score.value for score in other.scores] == [None, 0, 1]


def test_a_group_that_gets_another_number_of_scores_is_masked(make_scorer, tmp_path):
    (tmp_path / "mine.py").write_text(SEEN)
    function = f"{tmp_path / 'mine.py'}:group_of_two"
    scorer = make_scorer({"function": function}, {"function": function, "arguments": {"fails": True}, "weight": 0})
    two, three = scorer.score([make_group("a", "b"), make_group("a", "b", "c")])
    assert [score.parts for score in two.scores] == [{"group_of_two": 0.5}, {"group_of_two": 1.5}]
    assert [score.value for score in two.scores] == [None, None]  # the second function raised
    assert [score.parts for score in three.scores] == [{}, {}, {}]
    assert "3" in three.scores[0].error


class Backwards(Inline):
    """An executor of this test: a thread answers the calls later, the last one first."""

    def submit(self, calls):
        answers = [(Future(), answer.result()) for answer in super().submit(calls)]
        threading.Timer(0.1, lambda: [future.set_result(outcomes) for future, outcomes in reversed(answers)]).start()
        return [future for future, _ in answers]


def test_an_executor_that_answers_late_and_in_another_order_changes_no_score(make_scorer, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(SEEN)
    functions = [{"function": name} for name in ("gsm8k", f"{tmp_path / 'mine.py'}:longest", "strict_math")]
    groups = [make_group("#### 7", "#### 8", r"\boxed{7}"), make_group("a", "b", "")]
    expected = [group.scores for group in make_scorer(*functions).score(groups)]
    monkeypatch.setitem(BUILT_IN, "strict_math", "backwards")
    with closing(Scorer(reward_of(*functions), 8, executors={"backwards": Backwards, **EXECUTORS})) as scorer:
        assert [group.scores for group in scorer.score(groups)] == expected


def test_a_stop_while_scores_are_awaited_cancels_the_call() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    never = Future[None]()
    with pytest.raises(KeyboardInterrupt):
        waited(never, stop)
    assert never.cancelled()


def of_source(source: str, *texts: str) -> Group:
    group = make_group(*texts)
    return replace(group, prompt=replace(group.prompt, data_source=source))


def test_each_row_is_scored_by_the_functions_of_its_source(make_scorer, tmp_path):
    (tmp_path / "mine.py").write_text("def half(response): return 0.5")
    half = {"function": f"{tmp_path / 'mine.py'}:half"}
    shape = {"function": "format", "name": "shape", "arguments": {"pattern": "^#"}, "weight": 3.0}
    scorer = make_scorer(
        half, by_source={"gsm*": [half, half], "gsm8k": [{"function": "gsm8k"}, shape], "word?": [shape]}
    )
    sources = ("gsm8k", "gsm9", "word1", "other")
    groups = scorer.score([of_source(source, "#### 7") for source in sources])
    assert [group.scores[0].parts for group in groups] == [
        {"gsm8k": 1.0, "shape": 1.0},  # a name before a pattern
        {"half": 0.5, "half_2": 0.5},
        {"shape": 1.0},
        {"half": 0.5},
    ]
    assert [group.scores[0].value for group in groups] == [4.0, 1.0, 3.0, 0.5]
    assert [group.scores[0].solved for group in groups] == [True, False, True, False]  # full marks of each list


def test_metrics_are_also_of_each_source_where_there_are_several(make_scorer):
    shape = {"function": "format", "arguments": {"pattern": "^#"}}
    scorer = make_scorer(by_source={"a": [{"function": "gsm8k"}], "b/c": [shape]}, functions=[])
    groups = scorer.score([of_source("a", "#### 7", "#### 8"), of_source("b/c", "# x", "# y")])
    metrics = rollout_metrics(groups)
    assert not undocumented(metrics)
    assert (metrics["reward/a/mean"], metrics["reward/b/c/mean"], metrics["reward/mean"]) == (0.5, 1.0, 0.75)
    assert (metrics["reward/a/gsm8k"], metrics["reward/b/c/format"], metrics["reward/gsm8k"]) == (0.5, 1.0, 0.5)
    assert metrics["reward/a/solved_share"] == 0.5
    assert "reward/a/mean" not in rollout_metrics(groups[:1])


def test_a_row_of_a_source_without_functions_is_an_error(make_scorer):
    scorer = make_scorer(by_source={"a": [{"function": "gsm8k"}]}, functions=[])
    with pytest.raises(RewardError, match="other"):
        scorer.score([of_source("other", "#### 7")])


def test_gsm8k_starts_no_process(make_scorer, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: pytest.fail("starts a process"))
    scorer = make_scorer({"function": "gsm8k"}, workers=0)
    (group,) = scorer.score([make_group("step by step\n#### 7", "#### 8")])
    assert [score.value for score in group.scores] == [1.0, 0.0]


def test_a_bad_ground_truth_and_an_aborted_response_are_masked(make_scorer):
    scorer = make_scorer()
    bad, aborted = scorer.score([make_group("#### 7", ground_truth="many"), make_group("#### 7", finish="abort")])
    assert (bad.scores[0].value, aborted.scores[0].value) == (None, None)
    assert "ground truth 'many'" in bad.scores[0].error
    assert aborted.scores[0].error == "the engine gave up on the response"


@pytest.mark.parametrize(
    ("choices", "ground_truth"), [(4, "B"), ({"text": ["a"], "label": None}, "B"), ([], "[" * 100_000)]
)
def test_whatever_a_row_holds_costs_its_own_scores(make_scorer, choices, ground_truth):
    scorer = make_scorer({"function": "multiple_choice"})
    odd, plain = make_group("B", ground_truth=ground_truth), make_group("B", ground_truth="B")
    odd = replace(odd, prompt=replace(odd.prompt, extra_info={"choices": choices}))
    first, second = scorer.score([odd, plain])
    assert (first.scores[0].value, bool(first.scores[0].error)) == (None, True)
    assert second.scores[0].value == 1.0


def test_training_sees_shaped_scores_and_an_evaluation_the_plain_sums(make_scorer):
    scorer = make_scorer(non_stop_score=-1.0)
    groups = [make_group("#### 7", "#### 8", finish="length"), make_group("#### 7", finish="abort")]
    (shaped, aborted), (plain, _) = scorer.score(groups), scorer.score_unshaped(groups)
    assert [score.value for score in shaped.scores] == [-1.0, -1.0]
    assert [score.value for score in plain.scores] == [1.0, 0.0]
    assert [score.solved for score in shaped.scores] == [score.solved for score in plain.scores] == [True, False]
    assert (aborted.scores[0].value, aborted.scores[0].masked, aborted.scores[0].solved) == (None, "", False)


def test_a_file_that_cannot_be_imported_is_a_reward_error_and_leaves_no_process(make_scorer, tmp_path):
    (tmp_path / "mine.py").write_text("import nowhere_at_all")
    scorer = make_scorer({"function": f"{tmp_path / 'mine.py'}:mine"})
    with pytest.raises(RewardError, match="nowhere_at_all"):
        scorer.score([make_group("fine")])
    assert scorer._executors["workers"]._workers == []


def test_the_examples_of_the_docs_run(make_scorer, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    for name in ("brevity", "variety"):
        example = re.search(rf"<!-- example: rewards/{name}.py -->\n```python\n(.*?)```", page, re.DOTALL)
        assert example is not None
        (tmp_path / f"{name}.py").write_text(example.group(1))
    scorer = make_scorer(
        {"function": f"{tmp_path / 'brevity.py'}:brevity", "arguments": {"target": 10}},
        {"function": f"{tmp_path / 'variety.py'}:variety", "weight": 0.0},
    )
    (group,) = scorer.score([make_group("x" * 5, "x" * 15, "x" * 50, "x" * 50)])
    assert [score.value for score in group.scores] == [1.0, 0.5, 0.0, 0.0]
    assert group.scores[1].parts == {"brevity": 0.5, "brevity.length": 15.0, "variety": 0.75}
    assert group.scores[2].parts["variety"] == 0.5
