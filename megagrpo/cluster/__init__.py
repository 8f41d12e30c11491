"""Which process runs where, and what happens when one fails? Only this package starts processes with Ray."""
