"""Prompt files made of data sets as they are published: `prepare(source, output)` in a file for each."""
