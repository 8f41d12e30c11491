"""Weights in common coordinates: every side lists its boxes of each tensor; plans list the transfers between sides."""
