"""A sandbox for programs that no one has read: the container, the process inside, and the kinds that work here."""
