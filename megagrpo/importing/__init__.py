"""Recipes from the configurations of other frameworks: what each option becomes here, and what has no counterpart."""
