"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd, each slurmd in namespaces of its own.

A node has its own network, hostname, /dev/shm and disk (the state's `disk`): what runs on two nodes meets only over the
network. All state is in one directory, every process is a child or lives in one of our namespaces, and is ended by its
pid.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megagrpo.processes.ports import free_port
from tests.loop.small_run import REPOSITORY, own_environment, wait_until

SCRIPTS = REPOSITORY / "slurm"
EDIT = re.compile(r"^.*?( *# EDIT (\d).*)$", re.MULTILINE)
NODES = ("n1", "n2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "ip", "unshare", "mount", "hostname")
START_SECONDS = 300.0
"""For daemons, and for one command of Slurm, on a busy machine."""

# Nodes have one CPU each: two ranks of one CPU then need both. GPUs are counted, not there: scripts ask for them, and
# Ray finds none. As on most clusters, Slurm notices a lost node late.
CONF = """
ClusterName=test
SlurmctldHost={host}({network}.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# cred_expire is also how long a requeued job waits before it starts again
AuthInfo=socket={state}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={state}/controller
SlurmctldPidFile={state}/slurmctld.pid
SlurmdPidFile={state}/slurmd-%n.pid
SlurmdSpoolDir={state}/spool-%n
# neither systemd nor cgroups
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
SlurmctldParameters=node_reg_mem_percent=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
SlurmdTimeout=300
MinJobAge=86400
NodeName=n[1-2] NodeHostname=n[1-2] NodeAddr={network}.[11-12] Port=17000 CPUs=1 \
RealMemory=2000 Gres=gpu:8
PartitionName=test Nodes=n[1-2] Default=YES DefaultTime=10
"""


class UnavailableError(Exception):
    """Slurm cannot run on this machine."""


@dataclass
class Slurm:
    """A running Slurm. Nodes are n1 and n2."""

    state: Path
    network: str  # first three numbers of its addresses
    tag: str  # of namespaces and interfaces, which have names for the whole machine
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """For Slurm's commands. Without the tests' own settings, and a job's if tests run in one."""
        kept = {name: value for name, value in own_environment().items() if not name.startswith("SLURM_")}
        return kept | {"SLURM_CONF": str(self.state / "slurm.conf")}

    def command(self, *words: str, cwd: Path | None = None, check: bool = True) -> str:
        """Returns the output of one of Slurm's commands. Fails if it failed."""
        done = subprocess.run(
            words, env=self.environment, cwd=cwd, capture_output=True, text=True, check=False, timeout=START_SECONDS
        )
        assert done.returncode == 0 or not check, f"{' '.join(words)}: {done.stderr}"
        return done.stdout + done.stderr

    def job(self, job: int) -> dict[str, str]:
        """Fields of `scontrol show job`: JobState, ExitCode, Restarts, ..."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.command("scontrol", "--oneliner", "show", "job", str(job))))

    def wait_for_state(self, job: int, *states: str) -> dict[str, str]:
        """The job, once it is in one of these states and nothing of it is left."""
        wait_until(lambda: self.job(job)["JobState"] in states, f"job {job} {' or '.join(states)}")
        return self.job(job)

    def pids(self, node: str) -> list[int]:
        """Every process in a node's namespace, its slurmd among them, without zombies."""
        listed = subprocess.run(["ip", "netns", "pids", self._namespace(node)], capture_output=True, check=True)
        return [int(pid) for pid in listed.stdout.split()]

    def kill(self, node: str) -> None:
        """Kills a node as a loss of power does."""
        for pid in self.pids(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if slurmd := self.processes.pop(node, None):
            slurmd.wait(timeout=START_SECONDS)

    def start_node(self, node: str) -> None:
        self._start(node, *self._on(node, "slurmd", "-D", "-N", node))

    def _on(self, node: str, *words: str) -> list[str]:
        """A command that runs another on a node: in its network, with its own name, /dev/shm and disk."""
        inside = (
            'set -e; hostname "$1"; mount --bind "$2/hosts" /etc/hosts; mount --bind "$2/disk-$1" "$2/disk"; '
            'mount -t tmpfs -o mode=1777 tmpfs /dev/shm; shift 2; exec "$@"'
        )
        return [
            *("ip", "netns", "exec", self._namespace(node), "unshare", "--uts", "--mount", "--propagation", "private"),
            *("bash", "-c", inside, "bash", node, str(self.state), *words),
        ]

    def _namespace(self, node: str) -> str:
        return f"{self.tag}{node}"

    def _run(self, *words: str) -> None:
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=START_SECONDS)

    def _start(self, name: str, *words: str) -> None:
        with (self.state / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(words, env=self.environment, stdout=log, stderr=log)

    def start(self) -> None:
        """Raises UnavailableError where a machine does not permit what it takes."""
        try:
            self._connect()
            self._write()
            self._start_munged()
            self._start("slurmctld", "slurmctld", "-D", "-i")
            for node in NODES:
                (self.state / f"disk-{node}" / "tried").mkdir()
                self._run(*self._on(node, "rmdir", f"{self.state}/disk/tried"))  # fails where mounts do nothing
                self.start_node(node)
            wait_until(lambda: all(self._is_idle(node) for node in NODES), "two idle nodes", START_SECONDS)
            for node, other in (NODES, reversed(NODES)):  # firewalls may forbid what crosses a bridge
                reach = f": </dev/tcp/{self._addresses()[other]}/17000"  # its slurmd
                self._run(*self._on(node, "timeout", "60", "bash", "-c", reach))
        except (OSError, subprocess.CalledProcessError) as failed:
            raise UnavailableError(f"not permitted here: {failed} {getattr(failed, 'stderr', '')}") from failed

    def _connect(self) -> None:
        """A bridge, and a network namespace for each node with one link to it."""
        self._run("ip", "link", "add", f"{self.tag}br", "type", "bridge")
        self._run("ip", "addr", "add", f"{self.network}.1/24", "dev", f"{self.tag}br")
        self._run("ip", "link", "set", f"{self.tag}br", "up")
        for node, address in self._addresses().items():
            space = self._namespace(node)
            self._run("ip", "netns", "add", space)
            link = f"{self.tag}v{node}"
            self._run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
            self._run("ip", "link", "set", link, "master", f"{self.tag}br", "up")
            self._run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            self._run("ip", "-n", space, "link", "set", "lo", "up")
            self._run("ip", "-n", space, "link", "set", "eth0", "up")

    def _addresses(self) -> dict[str, str]:
        return {node: f"{self.network}.{number}" for number, node in enumerate(NODES, start=11)}

    def _start_munged(self) -> None:
        munge = self.state / "munge"
        self._start(
            "munged",
            *("munged", "--foreground", f"--key-file={munge}/key", f"--socket={munge}/socket"),
            *(f"--pid-file={munge}/pid", f"--seed-file={munge}/seed"),
        )
        wait_until(lambda: (munge / "socket").exists() or self.processes["munged"].poll() is not None, "munged")
        if not (munge / "socket").exists():
            raise UnavailableError(f"munged does not start here: {(self.state / 'munged.log').read_text().strip()}")

    def _is_idle(self, node: str) -> bool:
        return "State=IDLE " in self.command("scontrol", "--oneliner", "show", "node", node, check=False)

    def _write(self) -> None:
        of_nodes = [f"{directory}-{node}" for directory in ("disk", "spool") for node in NODES]
        for directory in ("munge", "controller", "disk", *of_nodes):
            (self.state / directory).mkdir(mode=0o755)
        host = socket.gethostname()
        conf = CONF.format(host=host, port=free_port(""), state=self.state, network=self.network)
        (self.state / "slurm.conf").write_text(conf)
        (self.state / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.state / "gres.conf").write_text(f"Name=gpu File={self.state}/gpu[0-7]\n")
        for gpu in range(8):
            (self.state / f"gpu{gpu}").touch()
        names = [f"{address} {node}" for node, address in self._addresses().items()]
        (self.state / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"{self.network}.1 {host}", *names, ""]))
        key = self.state / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))

    def stop(self) -> None:
        for node in NODES:
            with contextlib.suppress(subprocess.CalledProcessError):
                self.kill(node)
                self._run("ip", "netns", "del", self._namespace(node))
        for process in self.processes.values():
            process.kill()
            process.wait(timeout=START_SECONDS)
        with contextlib.suppress(subprocess.CalledProcessError):
            self._run("ip", "link", "del", f"{self.tag}br")


@contextlib.contextmanager
def slurm(state: Path) -> Iterator[Slurm]:
    """Slurm with its state in an empty directory, ended at the end. Short: Ray's sockets lie in it.

    Raises UnavailableError if this machine lacks what it takes.
    """
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        raise UnavailableError(f"no {', '.join(missing)} here: `make slurm-cpu` installs Slurm from Debian's packages")
    if os.getuid() != 0:
        raise UnavailableError("Slurm's daemons for two nodes need root")
    started = Slurm(state, f"10.231.{secrets.randbelow(254) + 1}", f"s{secrets.token_hex(2)}")
    try:
        started.start()
        yield started
    finally:
        started.stop()


def edited(script: Path, *lines: str) -> str:
    """A Slurm script as its user leaves it: one of `lines` on each line marked EDIT, before the mark."""
    return EDIT.sub(lambda marked: lines[int(marked[2]) - 1] + marked[1], script.read_text())


def overrides(recipe: dict[str, Any]) -> list[str]:
    """A whole recipe as overrides that replace the sections of another."""
    return [f"{section}={json.dumps(value)}" for section, value in recipe.items()]
