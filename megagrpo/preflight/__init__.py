"""Can this run start? What is checked before any process starts: recipe, model, data, packages, devices, disk."""
