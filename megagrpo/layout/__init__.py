"""Which rank holds what? The arithmetic of parallel sizes, without torch or processes."""
