"""benchmarks/weight_sync.py: where its processes are, and that it measures what arrived."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_processes_share_gpus_only_where_there_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    of = importlib.import_module("weight_sync").Devices.of
    alone, two, four = of("cuda", "4", 1), of("cuda", "45", 1), of("cuda", "4567", 2)
    assert [(its.ranks, its.engine) for its in (alone, two, four)] == [((0,), (0,)), ((0, 1), (0,)), ((0, 1), (2, 3))]
    assert [len(its.transports) for its in (alone, two, four)] == [1, 1, 2]  # NCCL refuses a shared GPU
    assert two.environment == {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert four.environment == {"CUDA_VISIBLE_DEVICES": "6,7,4,5"}
    assert two.topology(2, 1).shared_devices
    assert not four.topology(2, 2).shared_devices


@pytest.mark.long
def test_the_benchmark_verifies_every_sync_and_compares_it_with_a_copy() -> None:
    words = [BENCHMARKS / "weight_sync.py", "--device", "cpu", "--small", "--transports", "shared_memory", "disk"]
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS.parent)}
    ran = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in ran.stdout.splitlines() if "|" in line]
    header, _, *rows = table
    found = [dict(zip(header, row, strict=True)) for row in rows]
    assert [row["transport"] for row in found] == ["shared_memory", "disk"] * 3
    assert all(float(row["least"]) > float(row["least copy s"]) >= 0 for row in found)
    assert {row["x needed"] for row in found} == {"1.00"}
