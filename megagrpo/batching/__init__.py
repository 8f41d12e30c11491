"""Packs a step's sequences into the ranks' microbatches and balances them, without torch or processes."""
