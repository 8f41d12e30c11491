"""Makes the embedded engine choose other experts than the trainer: benchmarks/routing.py puts this on the path of runs.

ROUTER_NOISE is the deviation of what is added to a router's logits where it chooses; weights are of the logits alone.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from typing import Any


class NoisyEngine(importlib.abc.MetaPathFinder):
    """A finder that changes one module of megagrpo once it is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "megagrpo.rollout.transformers_engine":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            load_model = module.load_model
            module.load_model = lambda *arguments: with_noise(load_model(*arguments))

        spec.loader.exec_module = exec_module
        return spec


def with_noise(model: Any) -> Any:
    import torch

    generator, noise = torch.Generator().manual_seed(1), float(os.environ["ROUTER_NOISE"])

    def choose(router: Any, _: Any, output: Any) -> Any:
        logits, _, chosen = output
        noisy = logits + noise * torch.randn(logits.shape, generator=generator)
        chosen = noisy.topk(chosen.shape[-1], dim=-1).indices
        weights = logits.softmax(-1).gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(choose)
    return model


if "ROUTER_NOISE" in os.environ:
    sys.meta_path.insert(0, NoisyEngine())
