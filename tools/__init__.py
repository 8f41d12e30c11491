"""What is run from a clone of the repository, and is not installed with the package."""
