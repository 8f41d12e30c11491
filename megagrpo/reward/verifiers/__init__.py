"""The verifiers: `make(**arguments)`, or in a file of several the function of its name, returns a reward function."""
