"""Programs that are run from a clone of the repository, and are not installed with the package."""
