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

    def around(self, before: str, after: str, prefix: str, layer: int) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the norm before a part and the norm of its output, so called; empty where there is none."""
        first, last = (
            Tensor(f"{prefix}{name}_layernorm.weight", (self.hidden,), f"{name}_norm", layer)
            for name in (before, after)
        )
        return [first] * self.inputs, [last] * self.outputs
