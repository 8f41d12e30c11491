"""The engine over an SGLang server whose connection breaks. (Real servers are in tests/sglang.)"""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megagrpo.cluster.engines import make_engine
from megagrpo.errors import EngineError, Problem
from megagrpo.recipe.schema import SglangConfig
from megagrpo.rollout.client import Endpoint, RequestGate
from megagrpo.rollout.engine import Engine, EngineSpec
from megagrpo.rollout.sglang import arguments
from megagrpo.rollout.sglang.arguments import ARGUMENTS, cpu_cache_tokens, server_arguments
from megagrpo.rollout.sglang.client import ServedRoutes, SglangAnswer, SglangClient
from megagrpo.rollout.sglang.engine import AS_STARTED, SglangEngine, check_server
from megagrpo.routes import Routes, RouteSizes
from megagrpo.types import SamplingParams
from megagrpo.weights.families import read_architecture
from tests.rollout_engines import generate, request
from tests.tiny_run import EXPERTS, make_model, recipe_with

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@contextmanager
def breaking(asked: list[dict[str, Any]], lacks: str = "") -> Iterator[str]:
    """The address of a server that sends tokens up to 7, at most three at a time, and breaks the connection. Its
    answers lack a key."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as file:
                size = next(int(line.split(b":")[1]) for line in file if line.lower().startswith(b"content-length"))
                while file.readline().strip():
                    pass
                asked.append(body := json.loads(file.read(size)))
                tokens = list(range(max(body["input_ids"]) + 1, 8))[:3]
                finish = {"type": "stop"} if 7 in tokens else None
                meta = {"completion_tokens": len(tokens), "finish_reason": finish}
                meta["output_token_logprobs"] = [[-1.0, token, None] for token in tokens]
                meta["weight_versions"] = [{"version": "0", "start": 0, "end": len(tokens)}]
                meta.pop(lacks, None)
                event = b"data: " + json.dumps({"output_ids": tokens, "meta_info": meta}).encode() + b"\n\n"
                connection.sendall(HEAD + f"{len(event):x}\r\n".encode() + event + b"\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def engine_at(url: str) -> Any:
    client = SglangClient(Endpoint(url), failure=Problem, timeout_seconds=60)
    engine: Any = object.__new__(SglangEngine)
    Engine.__init__(engine, "engine 0")
    engine._client, engine._gate, engine._server = client, RequestGate(8), None
    engine._timeout, engine._streams, engine._pause, engine._released = 60.0, True, "retract", set()
    engine._ends, engine._answers, engine._fixed_version, engine._stops = {}, {}, None, {7, 2}
    engine._text = lambda tokens, finish: finish
    return engine


@pytest.mark.parametrize(("prompt", "times"), [(3, 2), (4, 1)], ids=["in the middle", "behind the end"])
def test_a_request_whose_connection_breaks_goes_on_after_its_tokens_and_ends_where_it_ends(
    prompt: int, times: int
) -> None:
    asked: list[dict[str, Any]] = []
    with breaking(asked) as url:
        engine = engine_at(url)
        (sample,) = generate(engine, [request([prompt], SamplingParams(max_tokens=4, stop_tokens=(9, 2)))])
        engine._client.close()
    assert (sample.tokens.tolist(), sample.finish) == (list(range(prompt + 1, 8)), "stop")
    assert [body["sampling_params"]["max_new_tokens"] for body in asked] == [4, 1][:times]
    assert [body["sampling_params"]["stop_token_ids"] for body in asked] == [[2, 7, 9]] * times


def test_an_answer_of_another_form_is_an_error_of_its_request() -> None:
    with breaking([], lacks="completion_tokens") as url:
        engine = engine_at(url)
        with pytest.raises(EngineError, match="completion_tokens"):
            generate(engine, [request([3], SamplingParams(max_tokens=4))])
        engine._client.close()


@pytest.mark.parametrize(
    ("tokens", "finish"), [([7, 8], "abort"), ([7, 2], "stop"), ([7, 3], "stop"), ([7, 8, 9], "length")]
)
def test_a_response_that_is_given_back_at_its_end_has_ended(tokens: list[int], finish: str) -> None:
    answer = SglangAnswer(request((5, 6), SamplingParams(3, stop_tokens=(3,))))
    entries = [[-0.5, token, None] for token in tokens]
    meta = {"completion_tokens": len(tokens), "output_token_logprobs": entries, "weight_version": "4"}
    answer.add({"output_ids": tokens, "meta_info": {**meta, "finish_reason": {"type": "abort"}}})
    assert answer.sample(lambda _tokens, _finish: "", "a server", stops={2}).finish == finish


@pytest.mark.parametrize(
    ("sets", "longest"),
    [("{}", 16), ("{a: {files: [{path: a.jsonl}]}}", 16), ("{a: {files: [{path: a}], response_tokens_max: 40}}", 40)],
)
def test_a_server_has_room_for_the_longest_response_of_training_and_evaluation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sets: str, longest: int
) -> None:
    started: list[dict[str, Any]] = []

    def start(_program: Any, arguments: dict[str, Any], **given: Any) -> None:
        started.append(arguments)
        raise EngineError(Problem("no server"))

    monkeypatch.setattr(arguments, "Server", start)
    recipe = recipe_with("rollout.engine=sglang", f"eval.sets={sets}")
    with pytest.raises(EngineError, match="no server"):
        make_engine(EngineSpec(recipe, 0, str(make_model(tmp_path / "model")), "model", "cpu"))
    room = cpu_cache_tokens(recipe.rollout.requests_at_once, recipe.data.prompt_tokens_max + longest)
    assert started[0]["max_total_tokens"] == room


@pytest.mark.parametrize(
    ("config", "override", "keeps_weights", "returned"),
    [
        (EXPERTS, "algorithm.routing=auto", False, True),
        (EXPERTS, "algorithm.routing=own", False, False),
        (EXPERTS, "algorithm.routing=replay", True, False),
        (EXPERTS, "rollout.layout.pipeline=2", False, False),
        (EXPERTS, "rollout.sglang.enable_hierarchical_cache=true", False, False),
        ({}, "algorithm.routing=auto", False, False),
    ],
    ids=["experts", "their own", "of evaluations alone", "in stages", "cached elsewhere", "dense"],
)
def test_a_server_is_started_to_return_routes_if_they_are_replayed(
    tmp_path: Path, config: dict[str, Any], override: str, keeps_weights: bool, returned: bool
) -> None:
    path = str(make_model(tmp_path / "model", **config))
    recipe = recipe_with("rollout.engine=sglang", override)
    spec = EngineSpec(recipe, 0, path, path, "cpu", keeps_weights=keeps_weights)
    assert server_arguments(spec.server).get("enable_return_routed_experts", False) == returned
    settings = SglangConfig(enable_return_routed_experts=True)
    (problem,) = ARGUMENTS.problems(settings, "rollout.sglang", "rollout.engine", plan_only=True)
    assert problem.fix == "set algorithm.routing"


def test_a_server_of_others_that_returns_no_routes_is_refused_with_both_ways_out(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", **EXPERTS)
    arch = read_architecture(path)
    info = AS_STARTED | {"dp_size": 1, "dtype": "float32", "tp_size": 1, "ep_size": 1, "pp_size": 1, "attn_dp_size": 1}
    info |= {"quantization": None, "device": "cpu"}
    recipe = recipe_with("rollout.engine=external", "rollout.urls=['http://127.0.0.1:1']")
    spec = EngineSpec(recipe, 0, str(path), str(path), "cpu")
    check_server(info | {"enable_return_routed_experts": True}, spec, arch)
    with pytest.raises(EngineError, match=r"--enable-return-routed-experts.*algorithm\.routing: own"):
        check_server(info, spec, arch)


def routed(experts: np.ndarray | None, tokens: int = 4, finish: str = "length") -> Routes | None:
    """Reads an answer of `tokens` after a prompt of 2; the model has a dense layer and two with 8 experts."""
    layers = ServedRoutes(RouteSizes(2, 2, 8), 3, (1, 2))
    answer = SglangAnswer(replace(request((5, 6), SamplingParams(tokens)), index=3), read_routes=layers.read)
    meta = {"completion_tokens": tokens, "output_token_logprobs": [[-0.5, 9, None]] * tokens, "weight_version": "4"}
    sent = None if experts is None else base64.b64encode(experts.tobytes()).decode()
    meta |= {"finish_reason": {"type": finish}, "routed_experts": sent}
    answer.add({"output_ids": [9] * tokens, "meta_info": meta})
    return answer.sample(lambda _tokens, _finish: "", "engine 0").routes


def served_routes(tokens: int = 4) -> np.ndarray:
    experts = np.arange(2 * 3 * (tokens + 1), dtype=np.int32).reshape(tokens + 1, 3, 2) % 8
    experts[:, 0] = 0  # SGLang's for a dense layer
    return experts


def test_only_an_answer_that_was_aborted_may_lack_routes() -> None:
    assert routed(None, finish="abort") is None
    with pytest.raises(EngineError, match="0 experts"):
        routed(None)


def test_routes_of_an_answer_are_those_of_layers_with_experts() -> None:
    routes = routed(served_routes())
    assert routes is not None
    assert np.array_equal(routes.experts, served_routes()[:, 1:])
    assert routes.experts.dtype == np.uint8


@pytest.mark.parametrize(
    "change",
    [
        lambda experts: experts[1:],
        lambda experts: np.concatenate([experts, experts[:1]]),
        lambda experts: experts[:, 1:],
        lambda experts: np.where(experts == 7, -1, experts),
        lambda experts: np.where(experts == 7, 2**16 + 1, experts),
        lambda experts: np.where(experts == 7, 6, experts),
        lambda experts: np.where(experts == 7, 8, experts),
    ],
    ids=["one missing", "one too many", "without dense layers", "-1", "too large", "repeated", "of no expert"],
)
def test_routes_that_cannot_be_an_answers_are_errors_that_name_the_sample(change: Any) -> None:
    with pytest.raises(EngineError, match="engine 0: sample 3 of prompt p"):
        routed(change(served_routes()).astype(np.int32))
