"""The RMSNorms of a layer (arXiv:1910.07467), and the way in which a part's output is added."""

from __future__ import annotations

from dataclasses import dataclass

from megagrpo.weights.families.parts.part import Tensor


@dataclass(frozen=True)
class Norms:
    """Norms of `hidden` elements: of the hidden states before a part, of its output before that is added, or of both.
    What is added is multiplied by `factor`."""

    hidden: int
    inputs: bool = True
    outputs: bool = False
    factor: float = 1.0

    @property
    def only_local(self) -> str | None:
        plain = self.inputs and not self.outputs and self.factor == 1
        return None if plain else "norms of outputs, or outputs by a factor"

    def around_attention(self, prefix: str, layer: int) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the norm before attention and the norm of its output; empty where there is none."""
        before = Tensor(prefix + "input_layernorm.weight", (self.hidden,), "input_norm", layer)
        after = Tensor(prefix + "attention_output_layernorm.weight", (self.hidden,), "attention_output_norm", layer)
        return [before] * self.inputs, [after] * self.outputs

    def around_mlp(self, prefix: str, layer: int) -> tuple[list[Tensor], list[Tensor]]:
        before = Tensor(prefix + "post_attention_layernorm.weight", (self.hidden,), "post_attention_norm", layer)
        after = Tensor(prefix + "mlp_output_layernorm.weight", (self.hidden,), "mlp_output_norm", layer)
        return [before] * self.inputs, [after] * self.outputs
