"""What happens in a run, in what order? From the checks before it starts through every step to the saves."""
