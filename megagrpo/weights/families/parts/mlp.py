"""MLPs that every token passes: gate, up and down projections with a SiLU (arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megagrpo.weights.families.parts.part import Divided, LayerTensors, LayerWork, Pass, Tensor, Unmet

if TYPE_CHECKING:
    from megagrpo.weights.sides.megatron_rank import LayerOnRank
    from megagrpo.weights.sides.sglang import EngineSizes, LayerOnEngine


@dataclass(frozen=True)
class Mlp:
    """An MLP with `ffn` columns between its projections."""

    hidden: int
    ffn: int

    experts = per_token = 0
    gathers = True
    """Tensor ranks gather its input, and scatter its output."""
    recomputed_as = "mlp"
    """The name in train.recompute under which the whole part is recomputed."""
    recomputes = frozenset({"mlp"})
    holds_norm = "mlp.linear_fc1"

    def tensors(self, prefix: str, layer: int) -> Iterator[Tensor]:
        at = prefix + "mlp."
        yield Tensor(at + "gate_proj.weight", (self.ffn, self.hidden), "gate", layer)
        yield Tensor(at + "up_proj.weight", (self.ffn, self.hidden), "up", layer)
        yield Tensor(at + "down_proj.weight", (self.hidden, self.ffn), "down", layer)

    def with_experts(self, experts: int) -> Mlp:
        return self

    def fields(self) -> dict[str, Any]:
        return {"ffn_hidden_size": self.ffn}

    def on_megatron(self, rank: LayerOnRank, of: LayerTensors) -> None:
        rank.rows("mlp.linear_fc1.weight", of.roles["gate"], of.roles["up"])
        rank.columns("mlp.linear_fc2.weight", of.roles["down"])

    def divided(self) -> list[Divided]:
        return [Divided("tensor", "MLP columns (intermediate_size)", self.ffn)]

    def on_sglang(self, rank: LayerOnEngine, of: LayerTensors) -> None:
        rank.mlp(of.roles["gate"], of.roles["up"], of.roles["down"], rank.padded(self.ffn))

    def unmet_on_sglang(self, sizes: EngineSizes, device: str) -> Iterator[Unmet]:
        if device != "cpu" and self.ffn % sizes.tensor:  # on CPUs SGLang pads it
            yield Unmet(f"ffn: {self.ffn}", f"a multiple of {sizes.tensor}")

    def work(self) -> LayerWork:
        return LayerWork(mlp=6.0 * self.hidden * self.ffn)

    def engine_columns(self, sizes: EngineSizes) -> float:
        """Returns the elements that an engine rank makes of a token of a prefill."""
        return 3 * self.ffn / sizes.tensor

    def kept_bytes(self, its: Pass) -> int:
        """Returns the bytes of the first product (gate and up) and the second's input; CPUs keep two tensors more."""
        tensors = 5 if its.device == "cpu" else 3
        return int(its.tokens * self.ffn / its.layout.tensor * tensors * its.element_bytes)

    def widest(self, its: Pass) -> tuple[int, int]:
        """Returns the rows and columns of the product before the second projection, on one rank."""
        return its.tokens, self.ffn // its.layout.tensor

    def forward_bytes(self, its: Pass) -> int:
        """Returns the bytes of a pass without gradients. With adapters: the product, the adapter's, and their sum."""
        if its.adapters:
            return 6 * its.tokens * self.ffn // its.layout.tensor * its.element_bytes
        return self.kept_bytes(its)
