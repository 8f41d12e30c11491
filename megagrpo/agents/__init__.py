"""Agents that are trained: a gateway that keeps tokens exact, the programs that ask it, tools and environments."""
