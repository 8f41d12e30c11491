"""How good is a response? Built-in functions and the user's own, in processes that may hang or crash."""
