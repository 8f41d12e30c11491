"""Where programs that no one has read run: what surrounds them, what is inside, and what of it this machine can do."""
