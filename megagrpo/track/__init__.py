"""How does the run go? Each step's metrics, to the console, JSON lines, MLflow, TensorBoard and W&B."""
