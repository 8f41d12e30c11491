"""The path from YAML and overrides to one checked Recipe."""
