"""Claude Code and Codex, unmodified, pointed at a gateway. Skipped where they are not on PATH."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from megagrpo.agents.turns import Limits
from megagrpo.types import Request, SamplingParams
from tests.agents.policy import STOP, Policy, gateway_of, tokenizer
from tests.agents.scripted import check

pytestmark = pytest.mark.long

LIMITS = Limits(turns_max=8, tokens_max=100_000, sampling=SamplingParams(max_tokens=200), seed=1)
SECONDS_MAX = 120
CODEX = """
model = "policy"
model_provider = "gateway"
[model_providers.gateway]
name = "gateway"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "KEY"
"""


def program(name: str, package: str) -> str:
    return shutil.which(name) or pytest.skip(f"no {name} on PATH: `npm install --global {package}`")


def says(text: str, seed: int) -> str:
    """Runs a command by the tool that there is, then says what it wrote."""
    if "<tool_response>" in text and "hi42" in text.rpartition("<tool_response>")[2]:
        return f"<think>\nDone.\n</think>\n\nIt says hi42.{STOP}"
    name, field = ("exec_command", "cmd") if '"exec_command"' in text else ("Bash", "command")
    return (
        f'I run it.\n<tool_call>\n{{"name":"{name}", "arguments":{{"{field}":"echo hi$((6*7))"}}}}\n</tool_call>{STOP}'
    )


async def run(command: list[str], directory: Path, settings: Any) -> None:
    """One rollout of the program, in a home of its own."""
    policy = Policy(says)
    async with gateway_of(policy) as gateway:
        key = gateway.open("p", 0, LIMITS)
        environment = {"HOME": str(directory), "PATH": os.environ["PATH"], **settings(gateway.url, key)}
        work = directory / "work"
        work.mkdir()
        process = await asyncio.create_subprocess_exec(
            *command, "Say what echo says.", cwd=work, env=environment, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, error = await asyncio.wait_for(process.communicate(), SECONDS_MAX)
        assert process.returncode == 0, (out, error)
        assert b"It says hi42." in out
        record = await gateway.close(key)
        sample = record.sample(Request("p", 0, (), 0, LIMITS.sampling), "stop")
        check(record, sample, policy.seen[key])
        assert sample.agent is not None
        texts = [tokenizer().decode(branch.tokens) for branch in sample.agent.branches]
        assert sum("I run it." in text and "It says hi42." in text for text in texts) == 1, "one branch, two turns"


def test_claude_code_is_a_rollout(tmp_path: Path) -> None:
    def settings(url: str, key: str) -> dict[str, str]:
        quiet = ("DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC")
        return {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key, **dict.fromkeys(quiet, "1")}

    command = [program("claude", "@anthropic-ai/claude-code"), "--model", "policy", "--allowedTools=Bash", "-p"]
    asyncio.run(run(command, tmp_path, settings))


def test_codex_is_a_rollout(tmp_path: Path) -> None:
    def settings(url: str, key: str) -> dict[str, str]:
        (tmp_path / ".codex").mkdir()
        (tmp_path / ".codex" / "config.toml").write_text(CODEX.format(url=url))
        return {"KEY": key}

    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    command = [program("codex", "@openai/codex"), "exec", *options]
    asyncio.run(run(command, tmp_path, settings))
