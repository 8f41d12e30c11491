"""How good is a model on held-out prompts, and how sure is that? Responses as files, metrics of them, comparisons."""
