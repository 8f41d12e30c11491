"""A run's directory, to look at: pages, plots, text, rules that say what is wrong. Reads files only."""
