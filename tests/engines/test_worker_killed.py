"""A worker of a real server is killed. This file comes last of those that share the server: it is gone afterwards."""

import signal
from pathlib import Path

import pytest

from megagrpo.errors import EngineError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.rollout import server as server_module
from megagrpo.rollout.server import SHARED_MEMORY, members
from megagrpo.types import SamplingParams
from megagrpo.weights.transport.choice import TransportName
from tests.engines.policy import Policy
from tests.engines.servers import AT_ONCE, Served
from tests.rollout_engines import generate, request


def test_a_server_with_a_killed_worker_is_named_with_its_log_and_nothing_of_it_stays(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "END_SECONDS", 60.0)
    server, engine, group = served.server, served.engine, served.server._process.pid
    policy = Policy(engine, served, ParallelLayout(), TransportName.SHARED_MEMORY)
    policy.sync(1, served.directory)
    policy.close()
    assert len(members(group)) > 2
    served.last_worker.send_signal(signal.SIGKILL)
    with pytest.raises(EngineError) as caught:
        generate(engine, [request([5, 6], SamplingParams(200), seed=seed) for seed in range(2 * AT_ONCE)])
    assert "engine 0" in str(caught.value)
    assert f"{server.log} ends with" in str(caught.value)
    engine.close()
    assert not members(group)
    assert not Path(server._directory).exists()
    assert not [file for file in server._shared if file.exists()]
    assert all(str(file).startswith(SHARED_MEMORY) for file in server._shared)
    assert engine.rests()
    with pytest.raises(EngineError, match="closed"):
        generate(engine, [request([5, 6], SamplingParams(3))])
