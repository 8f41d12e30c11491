"""What does a recipe come to? The sizes that follow from it, without starting anything."""
