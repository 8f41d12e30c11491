"""agent.tools: tools that the policy may call in the built-in loop, and their settings. See docs/agents_tools.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from megagrpo.errors import Problem
from megagrpo.section import Count, Seconds, Section

Memory = Annotated[int, Field(ge=16, le=2**24)]


class ToolConfig(Section):
    """One tool, or all tools of an MCP server."""

    name: str
    """python, FILE.py:NAME of a function or class of your own (examples/agents/ has some for search), or with `mcp` a
    name of your choice."""

    call_name: Annotated[str, Field(pattern=r"^[A-Za-z_][\w-]{0,63}$")] | None = None
    """Name under which the policy calls it. null: its own name. Not for a server or package with several tools."""

    mcp: str | None = None
    """An MCP server: the command that starts it, or its URL. All of its tools are offered."""

    stateful: bool = False
    """Each rollout has a state of its own: python keeps its variables from call to call; an MCP server is started, or a
    session with it begun, for each rollout. Classes of your own always have an object for each rollout."""

    timeout_seconds: Seconds = 60.0
    """Longest time of one call. The policy is then told that it took too long."""

    calls_at_once: Count = 64
    """Calls that run at the same time in one agent process. Others wait; their time does not count."""

    result_characters_max: Annotated[int, Field(ge=16, le=10**8)] = 10_000
    """Longest result that the policy gets. What is in the middle of a longer one is left out."""

    arguments: dict[str, Any] = {}
    """Settings of the tool, such as memory_mib for python; for a function of your own, values of parameters that the
    policy does not see; for a class, those that its objects are made with."""

    @property
    def own(self) -> bool:
        """Returns whether the tool is FILE.py:NAME."""
        return self.mcp is None and ".py:" in self.name

    def rules(self) -> Iterator[Problem]:
        if self.stateful and not self.mcp and self.name != "python":
            given, needed = f"true, for {self.name}", "false: only python and MCP servers can be both"
            yield Problem("stateful", given, needed, "remove it; for a state in tools of your own write a class")


# Arguments of the tools that are not the user's own. They are read when the tool is known: its name says which.


class PythonArguments(Section):
    memory_mib: Memory = 1024
    packages: bool = False
    """Programs may import what is installed."""

    imports: list[Annotated[str, Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*$")]] = []
    """Modules that are imported before, once for all programs."""

    isolation: Literal["auto", "bubblewrap", "seccomp", "none"] = "auto"


class McpArguments(Section):
    tools: list[str] | None = None
    """Only these."""

    headers: dict[str, str] = {}
    """Headers of HTTP requests. $NAME stands for an environment variable, so that no key has to be in a recipe."""

    env: dict[str, str] = {}
    """More environment variables of the command; $NAME as in headers."""
