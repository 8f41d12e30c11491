"""The parts of layers: attention, latent attention, MLPs, experts, norms."""
