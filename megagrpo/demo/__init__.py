"""The demo's model and data, made from code: a small model that adds two-digit numbers but forgets to carry."""
