"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd, each slurmd in namespaces of its own.

A node has its own network, hostname, /dev/shm and disk (the state's `disk`): what runs on two nodes meets only over the
network. All state is in one directory, every process is a child or lives in one of our namespaces, and is ended by its
pid.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megagrpo.ports import free_port

NODES = 2
CPUS_PER_NODE = 1
"""Two ranks of one CPU each then need both nodes."""
GPUS_PER_NODE = 8
"""Counted, not there: scripts ask for them, and Ray finds none."""
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "ip", "unshare")
START_SECONDS = 60.0
KILL_WAIT_SECONDS = 10
NODE_TIMEOUT_SECONDS = 300
"""As on most clusters: Slurm is the last to hear of a lost node."""

CONF = """
ClusterName=test
SlurmctldHost={host}({controller})
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
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
SlurmctldParameters=node_reg_mem_percent=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait={kill_wait}
SlurmdTimeout={node_timeout}
JobRequeue=1
MinJobAge=86400
NodeName=n[1-{nodes}] NodeHostname=n[1-{nodes}] NodeAddr={network}.[11-{last}] Port=17000 CPUs={cpus} \
RealMemory=2000 Gres=gpu:{gpus}
PartitionName=test Nodes=n[1-{nodes}] Default=YES DefaultTime=10
"""


def reason_to_skip() -> str | None:
    """Why Slurm cannot run here; None if it can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"no {', '.join(missing)} here: `make slurm-cpu` installs Slurm from Debian's packages"
    if os.getuid() != 0:
        return "Slurm's daemons for two nodes need root"
    name = f"try{secrets.token_hex(3)}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False, timeout=10)
    if tried.returncode == 0:
        inside = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "true"]
        tried = subprocess.run(inside, capture_output=True, text=True, check=False, timeout=10)
        subprocess.run(["ip", "netns", "del", name], check=False, timeout=10)
    return f"namespaces are not permitted here: {tried.stderr.strip()}" if tried.returncode else None


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
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "SLURM_"))}
        return kept | {"SLURM_CONF": str(self.state / "slurm.conf")}

    def command(self, *words: str, cwd: Path | None = None, check: bool = True) -> str:
        """What one of Slurm's commands prints. Fails if it failed."""
        done = subprocess.run(
            words, env=self.environment, cwd=cwd, capture_output=True, text=True, check=False, timeout=30
        )
        assert done.returncode == 0 or not check, f"{' '.join(words)}: {done.stderr}"
        return done.stdout + done.stderr

    def submit(self, *words: str, cwd: Path | None = None) -> int:
        """The id of a new job."""
        return int(self.command("sbatch", "--parsable", *words, cwd=cwd))

    def job(self, job: int) -> dict[str, str]:
        """What `scontrol show job` says: JobState, ExitCode, Restarts, ..."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.command("scontrol", "--oneliner", "show", "job", str(job))))

    def wait(self, moment: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not moment():
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
            time.sleep(0.2)

    def wait_for_state(self, job: int, *states: str, seconds: float = 120.0) -> dict[str, str]:
        """The job, once it is in one of these states and nothing of it is left."""
        self.wait(lambda: self.job(job)["JobState"] in states, f"job {job} {' or '.join(states)}", seconds)
        return self.job(job)

    def node(self, name: str) -> str:
        """The state of a node, such as IDLE or DOWN*."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.command("scontrol", "--oneliner", "show", "node", name)))["State"]

    def pids(self, node: str) -> list[int]:
        """Every process in a node's namespace, its slurmd among them. What ended but was not reaped is not there."""
        listed = subprocess.run(["ip", "netns", "pids", self._namespace(node)], capture_output=True, check=True)
        return [int(pid) for pid in listed.stdout.split()]

    def cut(self, node: str) -> None:
        """Cuts a node's network; nothing on it ends."""
        self._ip("link", "set", self._link(node), "down")

    def mend(self, node: str) -> None:
        self._ip("link", "set", self._link(node), "up")

    def kill(self, node: str) -> None:
        """As when a node loses power."""
        for pid in self.pids(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.processes.pop(node).wait(timeout=30)

    def start_node(self, node: str) -> None:
        inside = (
            'hostname "$1"; mount --bind "$2/hosts" /etc/hosts; mount --bind "$2/disk-$1" "$2/disk"; '
            'mount -t tmpfs -o mode=1777 tmpfs /dev/shm; exec slurmd -D -N "$1"'
        )
        self._start(
            node,
            *("ip", "netns", "exec", self._namespace(node), "unshare", "--uts", "--mount", "--propagation", "private"),
            *("bash", "-c", inside, "bash", node, str(self.state)),
        )

    def _namespace(self, node: str) -> str:
        return f"{self.tag}{node}"

    def _link(self, node: str) -> str:
        return f"{self.tag}v{node}"

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, timeout=10)

    def _start(self, name: str, *words: str) -> None:
        with (self.state / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(words, env=self.environment, stdout=log, stderr=log)

    def start(self) -> None:
        nodes = [f"n{number}" for number in range(1, NODES + 1)]
        self._ip("link", "add", f"{self.tag}br", "type", "bridge")
        self._ip("addr", "add", f"{self.network}.1/24", "dev", f"{self.tag}br")
        self._ip("link", "set", f"{self.tag}br", "up")
        for number, node in enumerate(nodes, start=11):
            space = self._namespace(node)
            self._ip("netns", "add", space)
            self._ip("link", "add", self._link(node), "type", "veth", "peer", "name", "eth0", "netns", space)
            self._ip("link", "set", self._link(node), "master", f"{self.tag}br", "up")
            self._ip("-n", space, "addr", "add", f"{self.network}.{number}/24", "dev", "eth0")
            self._ip("-n", space, "link", "set", "lo", "up")
            self._ip("-n", space, "link", "set", "eth0", "up")
        self._write(nodes)
        munge = self.state / "munge"
        self._start(
            "munged",
            *("munged", "--foreground", f"--key-file={munge}/key", f"--socket={munge}/socket"),
            *(f"--pid-file={munge}/pid", f"--seed-file={munge}/seed"),
        )
        self.wait((munge / "socket").exists, "munged's socket", START_SECONDS)
        self._start("slurmctld", "slurmctld", "-D", "-i")
        for node in nodes:
            self.start_node(node)
        self.wait(lambda: all(self._is_idle(node) for node in nodes), "two idle nodes", START_SECONDS)

    def _is_idle(self, node: str) -> bool:
        return "State=IDLE " in self.command("scontrol", "--oneliner", "show", "node", node, check=False)

    def _write(self, nodes: list[str]) -> None:
        of_nodes = [f"{directory}-{node}" for directory in ("disk", "spool") for node in nodes]
        for directory in ("munge", "controller", "disk", *of_nodes):
            (self.state / directory).mkdir(mode=0o755)
        host = socket.gethostname()
        conf = CONF.format(
            host=host,
            controller=f"{self.network}.1",
            port=free_port(""),
            state=self.state,
            network=self.network,
            nodes=NODES,
            last=10 + NODES,
            cpus=CPUS_PER_NODE,
            gpus=GPUS_PER_NODE,
            kill_wait=KILL_WAIT_SECONDS,
            node_timeout=NODE_TIMEOUT_SECONDS,
        )
        (self.state / "slurm.conf").write_text(conf)
        (self.state / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.state / "gres.conf").write_text(f"Name=gpu File={self.state}/gpu[0-{GPUS_PER_NODE - 1}]\n")
        for gpu in range(GPUS_PER_NODE):
            (self.state / f"gpu{gpu}").touch()
        names = [f"{self.network}.{number} {node}" for number, node in enumerate(nodes, start=11)]
        (self.state / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"{self.network}.1 {host}", *names, ""]))
        key = self.state / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))

    def stop(self) -> None:
        for node in [f"n{number}" for number in range(1, NODES + 1)]:
            with contextlib.suppress(subprocess.CalledProcessError):
                for pid in self.pids(node):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                self._ip("netns", "del", self._namespace(node))
        for process in self.processes.values():
            process.kill()
            process.wait(timeout=30)
        with contextlib.suppress(subprocess.CalledProcessError):
            self._ip("link", "del", f"{self.tag}br")


@contextlib.contextmanager
def slurm(state: Path) -> Iterator[Slurm]:
    """Slurm with its state in an empty directory, ended at the end. Short: Ray's sockets lie in it."""
    started = Slurm(state, f"10.231.{secrets.randbelow(254) + 1}", f"s{secrets.token_hex(2)}")
    try:
        started.start()
        yield started
    finally:
        started.stop()
