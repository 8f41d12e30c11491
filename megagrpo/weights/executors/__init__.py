"""How do the boxes of a plan move? Through checkpoint files, or as bytes in buckets."""
