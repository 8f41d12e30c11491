"""What transformers holds in memory after loading: parameter names of the model, whole, with experts stacked in 3-D."""

from __future__ import annotations

from collections import defaultdict

from megagrpo.weights.boxes import Manifest
from megagrpo.weights.families import tensors_of
from megagrpo.weights.families.architecture import Architecture, Role, Tensor
from megagrpo.weights.sides.assembly import ManifestBuilder


def manifest(arch: Architecture, dtype: str, holder: str = "transformers") -> Manifest:
    """Storages are the names of `model.named_parameters()`; a tied head is not among them.

    Experts, as transformers 5 stacks them: `experts.gate_up_proj` [experts, 2 ffn, hidden] and
    `experts.down_proj` [experts, hidden, ffn].
    """
    builder = ManifestBuilder(holder, dtype)
    experts: dict[int, dict[int, dict[Role, Tensor]]] = defaultdict(lambda: defaultdict(dict))
    for tensor in tensors_of(arch):
        if tensor.layer is not None and tensor.expert is not None:
            experts[tensor.layer][tensor.expert][tensor.role] = tensor
        else:
            builder.whole(tensor.name, tensor)
    for layer, of_layer in experts.items():
        prefix = f"model.layers.{layer}.mlp.experts."
        in_order = [of_layer[expert] for expert in sorted(of_layer)]
        builder.stacked(prefix + "gate_up_proj", [[roles["expert_gate"], roles["expert_up"]] for roles in in_order])
        builder.stacked(prefix + "down_proj", [[roles["expert_down"]] for roles in in_order])
    return builder.build()
