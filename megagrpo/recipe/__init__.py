"""What did the user ask for, and is it possible? From YAML and overrides to one checked Recipe."""
