"""A real server as a judge: the model says whether a response ends in a digit."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from megagrpo.recipe.schema import SglangConfig, VllmConfig
from megagrpo.reward.scorer import Scorer
from megagrpo.rollout.server import Server
from tests.engines.servers import server_spec, until_closed, vllm_python
from tests.judge_server import asking
from tests.reward_models import make_judge
from tests.unit.test_reward_judges import group_of, section

SAMPLING = {"max_tokens": 8}


@pytest.fixture(scope="module", params=["sglang", pytest.param("vllm", marks=pytest.mark.needs("vllm"))])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {"sglang": SglangConfig(), "vllm": VllmConfig(python=str(vllm_python()))}[request.param]
    root = tmp_path_factory.mktemp("judge")
    of_model = {"model_directory": str(make_judge(root / "model")), "log": root / "log", "tokens_per_request": 256}
    spec = server_spec(**of_model, settings=settings, requests_at_once=16, keeps_weights=True, chat_model="grader")
    started = settings.engine_kind.server(spec)
    with until_closed(started):
        yield started


@pytest.mark.long
def test_a_real_server_judges(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JUDGE_KEY", server.api_key)
    monkeypatch.setenv("WRONG_KEY", "x" * 20)
    given = {"url": f"{server.url}/v1", "model": "grader", "rubric": "{{response}}", "verdict": "yes_no"}
    given |= {"sampling": SAMPLING, "api_key_variable": "JUDGE_KEY"}
    texts = ("abc4", "4abc", "77", "x7x", "zz9")
    scorer = Scorer(section("judge", **given), 8, executors=asking(tmp_path))
    (group,) = scorer.score([group_of(*texts)])
    assert [score.value for score in group.scores] == [text[-1].isdigit() for text in texts]
    assert group.scores[0].notes["judge.verdict"] == "yes"
    spent = scorer.take_metrics()
    assert spent["judge/judge/requests"] == len(texts)
    assert spent["judge/judge/output_tokens"] == 4 * len(texts)
    scorer.close()
    refused = Scorer(section("judge", **given | {"api_key_variable": "WRONG_KEY", "cache": False}), 8)
    (group,) = refused.score([group_of("abc4")])
    assert "401" in group.scores[0].error
    refused.close()
