"""benchmarks/weight_sync.py: where its processes are, and that it measures what arrived."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megagrpo.weights.transport.choice import TransportName, choose_transport

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_processes_share_gpus_where_there_are_too_few_and_for_two_hops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    of = importlib.import_module("weight_sync").Devices.of
    [alone], [two], [own, shared] = of("cuda", "4", 1), of("cuda", "45", 1), of("cuda", "4567", 2)
    found = [(its.ranks, its.engine) for its in (alone, two, own, shared)]
    assert found == [((0,), (0,)), ((0, 1), (0,)), ((0, 1), (2, 3)), ((0, 1), (0, 1))]
    # NCCL refuses a shared GPU, and one rank has no other to send through.
    assert alone.transports == ("shared_memory",)
    assert two.transports == shared.transports == ("shared_memory", "two_hops")
    assert own.transports == ("shared_memory", "process_group")
    assert two.environment == {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert own.environment == {"CUDA_VISIBLE_DEVICES": "6,7,4,5"}


@pytest.mark.parametrize(("kind", "tensor"), [("cpu", 1), ("cpu", 2), ("cuda", 1), ("cuda", 2)])
def test_every_transport_is_measured_where_a_run_could_take_it(
    kind: str, tensor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("weight_sync")
    measured = set()
    for devices in module.Devices.of(kind, "4567" if kind == "cuda" else "", tensor):
        for name in module.transports_of(devices, tensor, [*TransportName]):
            measured.add(name)
            assert choose_transport(name, devices.topology(2, tensor, name)) == name
    assert measured == set(TransportName)


@pytest.mark.soak
def test_the_benchmark_verifies_every_sync_and_compares_it_with_a_copy() -> None:
    transports = ["shared_memory", "two_hops", "disk"]
    words = [BENCHMARKS / "weight_sync.py", "--device", "cpu", "--small", "--transports", *transports]
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS.parent)}
    ran = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in ran.stdout.splitlines() if "|" in line]
    header, _, *rows = table
    found = [dict(zip(header, row, strict=True)) for row in rows]
    assert [row["transport"] for row in found] == transports * 3
    assert all(float(row["least"]) > float(row["least copy s"]) >= 0 for row in found)
    assert {row["x needed"] for row in found if row["transport"] != "two_hops"} == {"1.00"}
    # Half of the weights lie on the other node, and travel twice; of two replicas the one beside the engine sends all.
    assert [row["x needed"] for row in found if row["transport"] == "two_hops"] == ["1.50", "1.50", "1.00"]
