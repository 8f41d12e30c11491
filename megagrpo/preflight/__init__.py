"""The checks before any process starts: recipe, model, data, packages, devices, disk."""
