"""The tracking of a run: each step's metrics, to the console, JSON lines, MLflow, TensorBoard and W&B."""
