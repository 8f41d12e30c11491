"""The path of prompts: files to checked rows, rows to token ids, and an order that survives a restart."""
