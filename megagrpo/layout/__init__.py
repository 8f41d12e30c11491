"""The arithmetic of parallel sizes: each rank's part of the model. No torch, no processes."""
