"""Checkpoints on disk: reading the boxes of a rank from files, and writing them into files."""
