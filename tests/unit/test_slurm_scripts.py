"""The Slurm scripts, as far as they can be checked without Slurm. What they do in jobs is in tests/slurm."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from megagrpo.processes.ports import EPHEMERAL
from megagrpo.recipe.defaults import plan_devices
from megagrpo.recipe.load import load
from tests.loop.small_run import REPOSITORY
from tests.slurm.cluster import EDIT, SCRIPTS, edited

JOBS = [SCRIPTS / "grpo_70b.sh", SCRIPTS / "train.sh"]


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_bash_reads_every_script(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("script", JOBS, ids=lambda path: path.name)
def test_exactly_three_lines_are_to_be_edited(script: Path) -> None:
    text = script.read_text()
    assert [marked[2] for marked in EDIT.finditer(text)] == ["1", "2", "3"]
    changed = edited(script, "#SBATCH --partition=mine", "cd /mine", "source /mine/bin/activate")
    assert "YOUR" not in changed
    assert "/shared" not in changed
    # Slurm stops reading its options at the first command.
    assert text.index("# EDIT 1") < text.rindex("#SBATCH") < text.index("set -euo pipefail") < text.index("# EDIT 2")


def test_the_70b_script_asks_for_the_nodes_of_its_recipe() -> None:
    recipe = load(REPOSITORY / "yaml_recipes" / "grpo_70b.yaml").recipe
    script = (SCRIPTS / "grpo_70b.sh").read_text()
    nodes, gpus = (int(re.findall(rf"--{name}=(\d+)", script)[0]) for name in ("nodes", "gpus-per-node"))
    assert nodes * gpus == plan_devices(recipe, "cuda").bundles
    assert gpus == recipe.cluster.gpus_per_node


def first_of_free_ports(job: int, listening: Sequence[int] = ()) -> int:
    """Returns the ports that ports.sh chooses while the ports in `listening` are taken on 127.0.0.1."""
    sockets = [socket.create_server(("127.0.0.1", port)) for port in listening]
    try:
        command = ["bash", "-c", f"source slurm/ports.sh; SLURM_JOB_ID={job} first_of_free_ports 127.0.0.1"]
        return int(subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout)
    finally:
        for listener in sockets:
            listener.close()


def test_jobs_have_ports_of_their_own() -> None:
    firsts = [first_of_free_ports(job) for job in (100, 101, 200, 201, 300, 301)]
    # A process that listens on the ports of one job moves the job to those of the next.
    assert any(second - first == 8 for first, second in zip(firsts[::2], firsts[1::2], strict=True))
    assert all(20000 <= first < int(EPHEMERAL.read_text().split()[0]) for first in firsts)


def test_a_port_that_is_taken_moves_the_job_to_others() -> None:
    first = first_of_free_ports(1000)
    assert first_of_free_ports(1000, listening=[first + 3]) not in range(first - 7, first + 4)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 0), (signal.SIGTERM, 143)])
def test_a_node_that_is_told_to_stop_saves_the_logs_of_its_ray_and_leaves_nothing(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    logs, disk, programs = tmp_path / "logs", tmp_path / "disk", tmp_path / "bin"
    for directory in (logs, programs):
        directory.mkdir()
    ray = programs / "ray"
    ray.write_text(f"#!/bin/sh\nmkdir -p {disk}/session_2/logs\ntouch {disk}/session_2/logs/gcs.out\nexec sleep 1000\n")
    ray.chmod(0o755)
    variables = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "1000",
        "SLURMD_NODENAME": "n1",
        "RAY_NODE_ADDRESS": "127.0.0.1",
        "RAY_ADDRESS": "127.0.0.1:20000",
        "RAY_PORT": "20000",
        "RAY_LOGS": str(logs),
        "RAY_TEMP": str(disk),
    }
    with subprocess.Popen(["bash", "slurm/ray_node.sh"], cwd=REPOSITORY, env=os.environ | variables) as node:
        deadline = time.monotonic() + 200
        while not (disk / "session_2" / "logs" / "gcs.out").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        node.send_signal(number)
        assert node.wait() == code
    assert (logs / "n1" / "gcs.out").exists()
    assert not disk.exists()


RUNNING = "JobId=7 Requeue=1 Restarts=0 JobState=RUNNING Reason=None PreemptTime=None End"


@pytest.mark.parametrize(
    ("told", "restarts", "job", "may"),
    [
        ("USR1", 0, RUNNING, True),
        ("TERM", 0, RUNNING, False),
        ("TERM", 0, RUNNING.replace("PreemptTime=None", "PreemptTime=2026-01-01T00:00:00"), True),
        ("USR1", 20, RUNNING, False),
        ("USR1", 0, RUNNING.replace("Requeue=1", "Requeue=0"), False),
        ("USR1", 0, RUNNING.replace("RUNNING", "CANCELLED"), False),
    ],
)
def test_a_job_goes_back_to_the_queue_if_it_was_not_to_end(told: str, restarts: int, job: str, may: bool) -> None:
    command = f"source slurm/ray_cluster.sh; scontrol() {{ echo '{job}'; }}; TOLD={told}; may_requeue"
    variables = os.environ | {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
    done = subprocess.run(["bash", "-c", command], cwd=REPOSITORY, env=variables)
    assert (done.returncode == 0) == may
