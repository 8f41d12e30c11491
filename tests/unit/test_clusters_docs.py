"""docs/clusters.md: Ray and megagrpo take the commands shown, and the exit codes are those of the errors."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from ray.scripts.scripts import cli as ray_cli

from megagrpo import cli, errors

PAGE = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
RAY = sorted(re.findall(r"^\$ ray (.+)$", PAGE, re.MULTILINE))


@pytest.mark.parametrize("command", RAY)
def test_ray_takes_every_command_shown(command: str) -> None:
    name, *arguments = shlex.split(command)
    group = ray_cli
    if name == "job":
        group, (name, *arguments) = ray_cli.commands["job"], arguments
    group.commands[name].make_context(name, arguments)
    if "megagrpo" in command:
        cli.parse(shlex.split(arguments[-1].rpartition("&& megagrpo ")[2]))


def test_there_are_commands_of_each_kind() -> None:
    assert {" ".join(command.split()[:2]) for command in RAY} == {
        "start --head",
        "start --address=10.0.0.1:6379",
        "job submit",
    }


def test_exit_codes_are_those_of_the_errors() -> None:
    listed = [int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)]
    codes = [errors.EXIT_USER_ERROR, errors.EXIT_RUN_FAILED, errors.EXIT_NODE_LOST, errors.EXIT_STOPPED]
    assert listed == [0, *codes, cli.EXIT_INTERRUPTED]
