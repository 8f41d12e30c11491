"""Processes: how they begin, reach each other and end."""
