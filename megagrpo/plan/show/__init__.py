"""A plan as text, as a page and as JSON."""
