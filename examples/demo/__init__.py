"""The demo's model and data, made from code: a small model learns to add two-digit numbers, then to carry."""
