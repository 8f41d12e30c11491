"""The parts of layers: attention, latent attention, MLPs, experts."""

from megagrpo.weights.families.parts.attention import Attention, Rope, Yarn
from megagrpo.weights.families.parts.experts import Experts, SigmoidRouter
from megagrpo.weights.families.parts.latent_attention import LatentAttention
from megagrpo.weights.families.parts.mlp import Mlp

__all__ = ["Attention", "Experts", "LatentAttention", "Mlp", "Rope", "SigmoidRouter", "Yarn"]
