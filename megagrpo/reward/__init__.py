"""The reward: built-in functions and the user's own, in processes that may hang or crash."""
