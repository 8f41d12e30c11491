"""The quality of a model on held-out prompts, and its uncertainty: responses as files, their metrics, comparisons."""
