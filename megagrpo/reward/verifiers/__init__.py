"""The verifiers, one per file: `make(**arguments)` returns the function that scores a response."""
