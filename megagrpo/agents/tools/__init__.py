"""The tools of the built-in agent: functions of the user's own, Python in a sandbox, MCP servers."""
