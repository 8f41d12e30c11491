"""The verifiers: `make(**arguments)`, or the function of its name in a file of several, returns what scores a response."""
