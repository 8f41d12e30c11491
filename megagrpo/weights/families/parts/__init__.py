"""The parts of layers: attention, latent attention, MLPs, experts."""

from megagrpo.weights.families.parts.attention import Attention, LongRope, Rope, Temperature, Yarn
from megagrpo.weights.families.parts.delta_net import DeltaNet
from megagrpo.weights.families.parts.experts import Experts, SigmoidRouter, SoftmaxRouter
from megagrpo.weights.families.parts.latent_attention import LatentAttention
from megagrpo.weights.families.parts.mlp import Mlp
from megagrpo.weights.families.parts.norms import Norms

__all__ = [
    "Attention", "DeltaNet", "Experts", "LatentAttention", "LongRope", "Mlp", "Norms", "Rope", "SigmoidRouter",
    "SoftmaxRouter", "Temperature", "Yarn",
]  # fmt: skip
