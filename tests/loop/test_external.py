"""A whole run whose rollouts come from a server that the run did not start and that outlives it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from megagrpo.errors import Problem
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.rollout.sglang.client import Endpoint, SglangClient, new_request_id, read_sample
from megagrpo.rollout.sglang.server import Server
from megagrpo.types import Request, Sample, SamplingParams
from tests.loop import small_run
from tests.rollout_engines import request
from tests.sglang.servers import START_SECONDS, WAIT_SECONDS, start_server
from tests.sglang.test_weights import check_logprobs
from tests.tiny_models import randomize

KEY_VARIABLE = "KEY_OF_THE_SERVER"
STEPS = 2
PROMPT = (3, 4, 5, 6)


@pytest.fixture
def server(inputs: Path, tmp_path: Path) -> Iterator[Server]:
    """Serves the run's model with other weights than those that the run starts from."""
    directory = tmp_path / "model"
    shutil.copytree(inputs / "model", directory)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    randomize(model, seed=1)
    model.save_pretrained(directory)
    started = start_server(directory, EngineLayoutConfig(), tmp_path / "server.log")
    try:
        started.wait_until_ready(START_SECONDS)
        yield started
    finally:
        started.close()


@pytest.mark.long
def test_a_run_trains_on_what_an_external_server_samples(
    server: Server, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, server.api_key)
    values = small_run.recipe(inputs, tmp_path)
    values["rollout"] |= {"engine": "external", "urls": [server.url], "api_key_variable": KEY_VARIABLE}
    recipe = small_run.write(values, tmp_path)
    overrides = f"train.total_steps={STEPS}", "track.mlflow=null"
    printed = small_run.train(recipe, *overrides)
    output = tmp_path / "small"

    by_step = small_run.metrics(output)
    assert sorted(by_step) == list(range(STEPS + 1))
    for step in range(1, STEPS + 1):
        assert by_step[step]["weights/version"] == step
        assert by_step[step]["logprob_difference/max"] < 1e-5, "the server and the training ranks have one policy"

    asked = server.log.read_text()
    assert answered(asked, "/update_weights_from_disk") == STEPS + 1
    assert answered(asked, "/update_weights_from_tensor") > STEPS + 1, "our loader is given the plan and asked digests"
    assert answered(asked, "/weights_checker") == 0, "SGLang's own digests are for servers without our loader"
    assert not (output / "weights").exists(), "weights on their way are removed at the end"

    asked_last = request(PROMPT, SamplingParams(8))
    sample = sample_of(server, asked_last)
    assert (sample.versions == STEPS).all()
    check_logprobs([sample], [asked_last], {STEPS: output / "hugging_face"})

    written = b"".join(file.read_bytes() for file in output.rglob("*") if file.is_file())
    assert server.api_key.encode() not in printed.encode() + written


def answered(log: str, path: str) -> int:
    """How many requests for `path` the server has logged as done."""
    return log.count(f'"POST {path} HTTP/1.1" 200')


def sample_of(server: Server, one: Request) -> Sample:
    """A sample for a client other than the run."""
    client = SglangClient(
        Endpoint(server.url, server.api_key),
        failure=lambda asked, given: Problem(asked, given),
        timeout_seconds=WAIT_SECONDS,
    )
    try:
        answer = client.run(client.generate(one, new_request_id(), WAIT_SECONDS))
    finally:
        client.close()
    return read_sample(one, answer, lambda tokens, finish: "", "the server")
