"""Runs one vLLM server. Started by server.py, with an interpreter of an environment that has vLLM.

    python launch.py < settings         settings: JSON, {"owner": pid, "directory": ..., "arguments": {...}, ...}

The arguments, the API key among them, come on standard input so that `ps` does not show them. vLLM spawns its engine
and its workers, and each runs this module's top level again: code that every process needs is called there.

Functions below, cpu_layers.py and listen_on_loopback of ../launching.py change vLLM 0.32, each for a reason of its own;
none changes how a model computes.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megagrpo.rollout.launching import Changes

DEVICE_VARIABLE = "MEGAGRPO_VLLM_DEVICE"
LOOK_MILLISECONDS = 2


def prepare_server_process(*, spawned: bool) -> None:
    runpy.run_path(str(Path(__file__).resolve().parents[1] / "find_megagrpo.py"))
    from megagrpo.rollout.launching import listen_on_loopback, prepare_process

    prepare_process(__file__, changes(), spawned=spawned)
    listen_on_loopback()


def changes() -> Changes:
    """Returns the changes of modules, by name."""
    everywhere: Changes = {
        "vllm.entrypoints.serve.middleware.authenticate": guard_every_path,
        "vllm.v1.engine.output_processor": tell_versions,
    }
    if os.environ.get(DEVICE_VARIABLE) != "cpu":
        return everywhere
    from megagrpo.rollout.vllm.cpu_layers import CHANGES

    of_cpus: Changes = {
        "vllm.platforms.cpu": fork_processes,
        "vllm.distributed.device_communicators.shm_broadcast": rest_while_waiting,
    }
    return {**everywhere, **of_cpus, **CHANGES}


def guard_every_path(authenticate: Any) -> None:
    """Asks for the API key on every path. vLLM asks only for those below /v1 and /inference: any local user could pause
    the server, or call its workers."""
    authenticate.GUARDED_PREFIX = ("/",)


def fork_processes(platform: Any) -> None:
    """Forks the engine and its workers where vLLM would spawn them: a spawned process imports vLLM for ten seconds. For
    CPUs only: CUDA does not survive a fork."""
    from megagrpo.processes.lifetime import end_with_parent

    cpu = platform.CpuPlatform
    check = cpu.check_and_update_config.__func__

    def check_and_fork(cls: Any, config: Any) -> None:
        check(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    cpu.check_and_update_config = classmethod(check_and_fork)
    os.register_at_fork(after_in_child=end_with_parent)
    # A SIGTERM to a child would wake the server's event loop, which would end and wait for requests without an engine.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def rest_while_waiting(shm_broadcast: Any) -> None:
    """Lets a process sleep while it waits for another one's message: training ranks, or other engines, need its core.
    By default it asks again and again until a second has passed. Some notes of messages are lost: it looks in between.
    """
    condition = shm_broadcast.SpinCondition
    condition.__init__.__defaults__ = (0.0,)
    wait = condition.wait

    def wait_and_look(self: Any, timeout_ms: int | None = None) -> None:
        wait(self, LOOK_MILLISECONDS if timeout_ms is None else min(timeout_ms, LOOK_MILLISECONDS))

    condition.wait = wait_and_look


def tell_versions(output_processor: Any) -> None:
    """Adds the weight versions of all tokens so far to every part of a stream: vLLM tells them in the last one only."""
    state = output_processor.RequestState
    complete = state._new_completion_output

    def complete_and_tell(self: Any, *arguments: Any, **options: Any) -> Any:
        output = complete(self, *arguments, **options)
        if output.weight_versions is None:
            output.weight_versions = self._weight_version_spans()
        return output

    state._new_completion_output = complete_and_tell


def words(arguments: Mapping[str, Any]) -> list[str]:
    """Returns arguments as words of a command line: `vllm serve` takes no others."""
    line = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            line.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            line += [f"--{flag}", *map(str, value)]
        elif value is not None:
            line.append(f"--{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return line


def main() -> None:
    from megagrpo.rollout.launching import end_with_owner

    settings = json.load(sys.stdin)
    end_with_owner(settings["owner"], settings["directory"], settings["shared_memory"])

    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words(settings["arguments"]))
    validate_parsed_serve_args(arguments)
    uvloop.run(run_server(arguments))


if __name__ in ("__main__", "__mp_main__"):
    prepare_server_process(spawned=__name__ == "__mp_main__")
if __name__ == "__main__":
    main()
