"""Whole runs whose rollouts come from real SGLang servers: of their own, or one that outlives the run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest

from examples.demo.model import make_tokenizer
from megagrpo.errors import EXIT_STOPPED
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.rollout.server import Server
from megagrpo.rollout.sglang.client import SglangAnswer, generate_body
from megagrpo.trainer.batches import read_batch
from megagrpo.types import SamplingParams
from tests.engines.policy import check_logprobs
from tests.engines.servers import client_of, start_server, until_closed
from tests.loop import small_run, test_agents
from tests.loop.conftest import watched
from tests.loop.listeners import ONE_NODE, check_table, listeners
from tests.loop.ray_nodes import RayNodes
from tests.rollout_engines import request
from tests.tiny_models import make_model

ON_SGLANG = ["rollout.engine=sglang", "track.mlflow=null"]
ELSEWHERE = [
    *ON_SGLANG,
    "cluster.placement=disaggregated",
    "rollout.engines=2",
    "cluster.start_timeout_seconds=600",
    "weights.bucket_bytes=8192",
    "weights.transfer=process_group",
]
ADAPTERS = ["train.lora={rank: 4, alpha: 8}"]
FOR_EVER = ["train.total_steps=10000", "algorithm.skip_groups_without_signal=false"]
"""Each step has its figures, also once all is learnt."""
KEY_VARIABLE = "KEY_OF_THE_SERVER"
PROMPT = (3, 4, 5, 6)


def check_trained(directory: Path, steps: int) -> dict[int, dict[str, float]]:
    """Checks that engines had each step's weights, and sampled from the trained ones. Returns the run's metrics."""
    by_step = small_run.metrics(directory)
    assert sorted(by_step) == list(range(steps + 1))
    for step in range(1, steps + 1):
        assert by_step[step]["weights/version"] == step
        assert by_step[step]["logprob_difference/max"] < 1e-5, "the servers and the training ranks have one policy"
    return by_step


def test_a_run_on_sglang_trains_on_what_its_servers_sampled_and_listens_where_the_documentation_says(
    inputs: Path, tmp_path: Path
) -> None:
    recipe, steps = small_run.write(small_run.recipe(inputs, tmp_path), tmp_path), 2
    process = small_run.start(recipe, *ON_SGLANG, f"train.total_steps={steps}")  # on a Ray of its own, as the demo
    run = watched(process, tmp_path / "small")
    by_step = check_trained(run.directory, steps)
    assert len({entry["eval/sums/mean@1"] for entry in by_step.values() if "eval/sums/mean@1" in entry}) > 1
    assert Counter(run.actors.values()) == {"RankActor": 2, "EngineActor": 1}
    assert ("server", "127.0.0.1") in run.listeners
    assert {address for _, address in run.listeners} == {"127.0.0.1"}
    check_table(run.listeners, 1, ONE_NODE)


def server_logging_to(log: Path) -> psutil.Process:
    """The first process of the server that writes there."""
    for process in psutil.process_iter(["cmdline"]):
        if any(part.endswith("sglang/launch.py") for part in process.info["cmdline"] or ()):
            with contextlib.suppress(OSError):
                if (
                    Path(f"/proc/{process.pid}/fd/1").resolve() == log.resolve()
                    and os.getpgid(process.pid) == process.pid
                ):
                    return process
    raise AssertionError(f"no server writes to {log}")


@pytest.mark.soak
@pytest.mark.timeout(2 * small_run.RUN_SECONDS)
def test_an_engine_over_two_nodes_is_synced_and_starts_again_when_its_process_on_one_is_killed(
    inputs: Path, tmp_path: Path
) -> None:
    recipe, run = small_run.write(small_run.recipe(inputs, tmp_path), tmp_path), tmp_path / "small"
    over_nodes = ["rollout.layout.tensor=2", "cluster.gpus_per_node=1", "cluster.start_timeout_seconds=600"]
    with RayNodes(cpus_per_node=1) as cluster:
        cluster.start_worker()
        process = small_run.start(recipe, *ON_SGLANG, *over_nodes, environment=cluster.environment)
        metrics, log = run / "metrics.jsonl", run / "logs" / "engine_0_node_1.log"
        small_run.wait_until(
            lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 1, "step 1", process=process
        )
        found = listeners(process.pid, *cluster.pids())
        assert {address for kind, address in found if kind == "server"} <= {"127.0.0.1", cluster.head, cluster.worker}
        assert {address for kind, address in found if kind == "engine"} <= {"::", cluster.head, cluster.worker}
        server_logging_to(log).kill()
        printed = small_run.end(process)
    assert "restarting engine 0" in printed
    check_trained(run, small_run.STEPS)


def latent_model(directory: Path, seed: int) -> Path:
    """A model with latent attention and the demo's tokenizer."""
    tokenizer = make_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    make_model("deepseek_v3", directory, seed=seed, vocab_size=len(tokenizer), num_hidden_layers=2, **ids)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serves other weights than those that a run starts from."""
    directory = tmp_path_factory.mktemp("server")
    started = start_server(latent_model(directory / "served", seed=1), EngineLayoutConfig(), directory / "server.log")
    with until_closed(started):
        yield started


@pytest.mark.soak
def test_a_run_with_latent_attention_trains_on_what_an_external_server_samples(
    server: Server, inputs: Path, tmp_path: Path, ray: Mapping[str, str]
) -> None:
    values = small_run.recipe(inputs, tmp_path)
    values["model"]["path"] = str(latent_model(tmp_path / "model", seed=0))
    values["rollout"] |= {"engine": "external", "urls": [server.url], "api_key_variable": KEY_VARIABLE}
    values["train"]["total_steps"] = steps = 2
    environment = {**ray, KEY_VARIABLE: server.api_key}
    printed = small_run.train(small_run.write(values, tmp_path), environment=environment)
    output = tmp_path / "small"
    check_trained(output, steps)

    asked = server.log.read_text()
    assert answered(asked, "/update_weights_from_disk") == steps + 1
    assert answered(asked, "/update_weights_from_tensor") > steps + 1, "our loader is given the plan and asked digests"
    assert answered(asked, "/weights_checker") == 0, "SGLang's own digests are for servers without our loader"
    assert not (output / "weights").exists(), "weights on their way are removed at the end"

    one = request(PROMPT, SamplingParams(8))
    answer = SglangAnswer(one)
    with client_of(server) as client:
        body = generate_body(one, "a request of another client", steps, (), streams=False)
        client.run(client.generate(body, body["rid"], answer, asyncio.Event()))
    sample = answer.sample(lambda tokens, finish: "", "the server")
    assert (sample.versions == steps).all()
    check_logprobs([sample], [one], {steps: output / "hugging_face"})

    written = b"".join(file.read_bytes() for file in output.rglob("*") if file.is_file())
    assert server.api_key.encode() not in printed.encode() + written


@pytest.mark.long
def test_turns_of_agents_that_a_server_samples_are_what_is_trained(
    server: Server, inputs: Path, tmp_path: Path, ray: Mapping[str, str]
) -> None:
    """The server still has the weights of the run before."""
    recipe, steps = test_agents.write(inputs, tmp_path, "agents", {"kind": "sync"}), 2
    engine = ("rollout.engine=external", f"rollout.urls=[{server.url}]", f"rollout.api_key_variable={KEY_VARIABLE}")
    model = f"model.path={latent_model(tmp_path / 'model', seed=2)}"
    overrides = (*engine, model, "deterministic=false", f"train.total_steps={steps}")
    small_run.train(recipe, *overrides, environment={**ray, KEY_VARIABLE: server.api_key})
    entries = check_trained(tmp_path / "agents", steps)
    test_agents.require_whole(tmp_path / "agents", range(1, steps + 1))
    for step in range(1, steps + 1):
        assert entries[step]["agent/turns/max"] == 3.0
        assert 1.0 < entries[step]["agent/branches/mean"] < 2.0
        assert entries[step]["agent/failed"] == 0.0


def answered(log: str, path: str) -> int:
    """Counts the requests for `path` that the server has logged as done."""
    return log.count(f'"POST {path} HTTP/1.1" 200')


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.soak
def test_a_run_with_adapters_goes_on_when_a_server_is_killed_or_stopped(
    number: signal.Signals, inputs: Path, tmp_path: Path, ray: Mapping[str, str]
) -> None:
    recipe, run = small_run.write(small_run.recipe(inputs, tmp_path), tmp_path), tmp_path / "small"
    process = small_run.start(recipe, *ELSEWHERE, *ADAPTERS, *FOR_EVER, environment=ray)
    with ThreadPoolExecutor(1) as pool, ExitStack() as failing:
        failing.callback(process.kill)
        ended = pool.submit(small_run.end, process, EXIT_STOPPED)
        wait_for_engines(2, run, ended)
        signal_a_scheduler(number)
        wait_for_engines(1, run, ended)
        wait_for_engines(2, run, ended)
        process.send_signal(signal.SIGTERM)
        failing.pop_all()
        printed = ended.result()
    lost = [line for line in printed.splitlines() if "restarting engine" in line]
    back = [line for line in printed.splitlines() if "samples again, with verified weights" in line]
    assert len(lost) == len(back) == 1, "\n".join(lost + back)
    assert ("was stopped (SIGSTOP)" in lost[0]) == (number == signal.SIGSTOP)
    last = max(small_run.metrics(run))
    assert check_trained(run, last)[last]["kl/mean"] > 1e-5, "the servers' adapters are not those of the start"


def wait_for_engines(count: int, run: Path, ended: Future[str]) -> None:
    """Until so many sample after a step. Fails with what the run printed, if that ends first."""

    def sample() -> bool:
        assert not ended.done(), ended.result()
        with contextlib.suppress(FileNotFoundError, ValueError):  # a line that is being written
            by_step = small_run.metrics(run)
            return by_step[max(by_step)].get("engines/serving") == count
        return False

    small_run.wait_until(sample, f"{count} engines")


def is_engine(process: psutil.Process) -> bool:
    return "ray::Engine" in " ".join(process.cmdline())


def signal_a_scheduler(number: int) -> None:
    """One of the run's two: the Ray that it joined is ours, as are servers that no run has started."""
    schedulers: list[psutil.Process] = []

    def two() -> bool:
        schedulers.clear()
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                if "sglang::scheduler" in " ".join(child.cmdline()) and any(map(is_engine, child.parents())):
                    schedulers.append(child)
        return len(schedulers) == 2

    small_run.wait_until(two, "two schedulers")  # one look in 40 misses one that is there
    schedulers[0].send_signal(number)


@pytest.mark.timeout(2 * small_run.RUN_SECONDS)
@pytest.mark.parametrize("pause", ["in_place", "retract"])
@pytest.mark.soak
def test_an_asynchronous_run_trains_each_prompt_once_within_its_staleness_also_responses_that_updates_fall_into(
    pause: str, inputs: Path, tmp_path: Path, ray: Mapping[str, str]
) -> None:
    values, steps = small_run.recipe(inputs, tmp_path), 3
    values["schedule"], values["weights"] = {"kind": "async", "max_staleness": 2}, {"pause": pause}
    values["data"]["prompt_tokens_max"], values["cluster"]["placement"] = 12, "disaggregated"
    # Two samples at a time, so that the engine has far more to do than the rank: updates find it at work.
    values["rollout"] |= {"engine": "sglang", "response_tokens_max": 32, "requests_at_once": 2}
    values["train"] |= {"layout": {"tensor": 1}, "total_steps": steps, "tokens_per_microbatch": 512}
    values["checkpoint"] |= {"keep_batches": steps, "export_every_steps": 1}
    values["cluster"]["start_timeout_seconds"] = 600
    small_run.train(small_run.write(values, tmp_path), environment=ray)

    run = tmp_path / "small"
    batches = {step: read_batch(run, step).sampled.groups for step in range(1, steps + 1)}
    prompts = {group.prompt.id: group.prompt.tokens for groups in batches.values() for group in groups}
    assert [len(groups) for groups in batches.values()] == [4] * steps
    assert len(prompts) == 4 * steps, "each is trained once"
    trained = {step: [one for group in groups for one in group.samples] for step, groups in batches.items()}
    for step, samples in trained.items():
        assert {step - 1 - int(version) for one in samples for version in one.versions} <= {0, 1, 2}
        assert all((np.diff(one.versions) >= 0).all() for one in samples)
    mixed = [one for samples in trained.values() for one in samples if len(set(one.versions.tolist())) > 1]
    assert mixed, "no update fell into a response"
    by_step = small_run.metrics(run)
    assert any(by_step[step]["staleness/mixed_share"] for step in trained)
    assert by_step[1]["logprob_difference/max"] < 1e-5, "the first step has samples of the newest weights alone"

    if pause == "retract":  # every key and value is of the weights that sample: a token has its version's logprob
        directories = {step: run / "hugging_face_steps" / f"step_{step:06d}" for step in (1, 2)}
        one = max(mixed, key=lambda sample: len(set(sample.versions.tolist())))
        asked = request(prompts[one.prompt_id], SamplingParams(32))
        check_logprobs([one], [asked], {0: inputs / "model"} | directories)
