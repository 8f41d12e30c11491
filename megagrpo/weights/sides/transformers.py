"""The manifest of a model that transformers has loaded: whole tensors by parameter name, experts stacked in 3-D."""

from __future__ import annotations

from megagrpo.weights.boxes import Manifest
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.sides.assembly import ManifestBuilder, all_rows, tensors_by_role


def manifest(arch: Architecture, dtype: str, holder: str = "transformers") -> Manifest:
    """Returns a manifest with the names of `model.named_parameters()` as storages. A tied head is not among them.

    Experts are stacked as in transformers 5, whatever the family calls them: `mlp.gate.weight` [experts, hidden],
    `mlp.experts.gate_up_proj` [experts, 2 ffn, hidden] and `mlp.experts.down_proj` [experts, hidden, ffn].
    """
    builder = ManifestBuilder(holder, dtype)
    model = tensors_by_role(arch)
    for tensor in model.roles.values():
        builder.whole(tensor.name, tensor)
    for index, layer in enumerate(model.layers):
        module = f"model.layers.{index}.mlp."
        for role, tensor in layer.roles.items():
            builder.whole(module + "gate.weight" if role == "router" else tensor.name, tensor)
        if not layer.experts:
            continue
        prefix = module + "experts."
        gate_up = [[all_rows(roles["expert_gate"]), all_rows(roles["expert_up"])] for roles in layer.experts]
        builder.stacked(prefix + "gate_up_proj", gate_up, arch.hidden)
        down = [[all_rows(roles["expert_down"])] for roles in layer.experts]
        builder.stacked(prefix + "down_proj", down, layer.experts[0]["expert_down"].shape[1])
    return builder.build()
