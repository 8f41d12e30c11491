"""Where do prompts come from? Files to checked rows, rows to token ids, and an order that survives a restart."""
