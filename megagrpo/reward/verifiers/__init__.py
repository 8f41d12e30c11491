"""One file a verifier: `make(**arguments)` gives the function that scores a response."""
