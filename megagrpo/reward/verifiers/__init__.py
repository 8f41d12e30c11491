"""The verifiers: `make(**arguments)`, or where a file has several that of its name, returns what scores a response."""
