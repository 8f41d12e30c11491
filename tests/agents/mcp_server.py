"""A real MCP server for tests, by the package mcp. `python mcp_server.py` speaks on its pipes; with a number, it serves
streamable HTTP on that port."""

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tests")
counts = {"calls": 0}


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def count() -> int:
    """Counts its calls in this process."""
    counts["calls"] += 1
    return counts["calls"]


@server.tool()
async def wait(seconds: float) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def fail(text: str) -> str:
    """Fails."""
    raise ToolError(text)


@server.tool()
def leave() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
def variable(name: str) -> str:
    """Reads an environment variable."""
    return os.environ.get(name, "")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
