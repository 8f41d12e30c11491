"""The processes of a run, their nodes, and the handling of failures. Only this package starts processes with Ray."""
