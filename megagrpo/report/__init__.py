"""Views of a run's directory: pages, plots, text, and rules that find problems. Reads files only."""
