"""The sizes that follow from a recipe, computed without starting anything."""
