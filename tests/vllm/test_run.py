"""Whole runs whose rollouts come from vLLM servers of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from examples.demo.model import make_tokenizer
from megagrpo.errors import EngineError
from megagrpo.recipe.schema import VllmConfig
from megagrpo.rollout.server import Server
from megagrpo.rollout.sglang import client as sglang
from megagrpo.rollout.vllm.arguments import start_server
from megagrpo.rollout.vllm.client import served_model
from tests.engines.servers import server_spec, until_closed, vllm_python
from tests.loop import small_run
from tests.loop.listeners import ONE_NODE, check_table, listeners
from tests.loop.test_sglang import KEY_VARIABLE, check_trained
from tests.tiny_models import make_model

pytestmark = pytest.mark.needs("vllm")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's inputs, with a model whose heads vLLM's attention on CPUs can have."""
    directory, tokenizer = tmp_path_factory.mktemp("inputs"), make_tokenizer()
    small_run.make_inputs(directory)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    make_model("qwen2_tied", directory / "model", **sizes, **ids)
    tokenizer.save_pretrained(directory / "model")
    return directory


def on_vllm(*overrides: str) -> list[str]:
    return ["rollout.engine=vllm", f"rollout.vllm.python={vllm_python()}", *overrides]


@pytest.mark.long
@pytest.mark.timeout(2 * small_run.RUN_SECONDS)
def test_a_run_listens_where_the_documentation_says_and_goes_on_after_a_worker_of_its_split_server_was_killed(
    inputs: Path, tmp_path: Path
) -> None:
    recipe, run = small_run.write(small_run.recipe(inputs, tmp_path), tmp_path), tmp_path / "small"
    process = small_run.start(recipe, *on_vllm("rollout.layout.tensor=2"))
    metrics = run / "metrics.jsonl"
    small_run.wait_until(
        lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 1, "step 1", process=process
    )
    found = listeners(process.pid)
    assert ("server", "127.0.0.1") in found
    check_table(found, 1, ONE_NODE)
    of_run = psutil.Process(process.pid).children(recursive=True)
    worker = next(one for one in of_run if one.cmdline() and one.cmdline()[0].startswith("VLLM::Worker"))
    os.kill(worker.pid, signal.SIGKILL)
    printed = small_run.end(process)
    assert "restarting engine 0" in printed
    check_trained(run, small_run.STEPS)
    assert not [one for one in of_run if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.soak
@pytest.mark.timeout(2 * small_run.RUN_SECONDS)
@pytest.mark.parametrize("transfer", ["disk", "process_group"])
def test_every_step_samples_from_its_weights_by_each_transport(inputs: Path, tmp_path: Path, transfer: str) -> None:
    recipe = small_run.write(small_run.recipe(inputs, tmp_path), tmp_path)
    apart = ["cluster.placement=disaggregated", f"weights.transfer={transfer}", "train.total_steps=2"]
    small_run.train(recipe, *on_vllm(*apart))
    check_trained(tmp_path / "small", 2)


@pytest.fixture(scope="module")
def server(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the weights of the model's files, as another would have started it."""
    directory, model = tmp_path_factory.mktemp("server"), inputs / "model"
    given = {"model_directory": str(model), "log": directory / "log", "settings": VllmConfig(python=str(vllm_python()))}
    started = start_server(server_spec(**given, keeps_weights=True))
    with until_closed(started):
        yield started


@pytest.mark.long
def test_a_run_trains_on_what_a_server_that_runs_already_samples(server: Server, inputs: Path, tmp_path: Path) -> None:
    values = small_run.recipe(inputs, tmp_path)
    values["rollout"] |= {"engine": "external_vllm", "urls": [server.url], "api_key_variable": KEY_VARIABLE}
    values["train"]["total_steps"] = steps = 2
    small_run.train(small_run.write(values, tmp_path), environment={**os.environ, KEY_VARIABLE: server.api_key})
    check_trained(tmp_path / "small", steps)
    assert served_model(server.url, server.api_key) == {"model_path": str(inputs / "model")}
    with pytest.raises(EngineError, match="a running SGLang server"):
        sglang.served_model(server.url, server.api_key)
