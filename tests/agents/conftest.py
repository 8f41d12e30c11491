from tests.agents.environments import agent_python

__all__ = ["agent_python"]
