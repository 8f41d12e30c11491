"""Examples: files that a recipe may name, and `python -m examples.prepare`, which makes models and data."""
