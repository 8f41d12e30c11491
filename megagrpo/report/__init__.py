"""A run's directory as text: what `megagrpo report` prints. Reads files only."""
