"""Checkpoints: the state with which a killed run resumes with the same numbers, and the removal of old ones."""
