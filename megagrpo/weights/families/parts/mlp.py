"""MLPs that every token passes: up and down projections, most with a gate (arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megagrpo.weights.families.parts.part import Divided, LayerTensors, LayerWork, Pass, Roles, Tensor, Unmet

if TYPE_CHECKING:
    from megagrpo.weights.sides.megatron_rank import LayerOnRank
    from megagrpo.weights.sides.sglang import EngineSizes, LayerOnEngine


Activation = Literal["silu", "gelu_tanh", "relu2"]


@dataclass(frozen=True)
class Mlp:
    """An MLP with `ffn` columns between its projections. One with relu^2 (arXiv:2109.08668) has no gate."""

    hidden: int
    ffn: int
    activation: Activation = "silu"

    experts = per_token = 0
    bias = False
    gathers = True
    """Tensor ranks gather its input, and scatter its output."""
    recomputed_as = "mlp"
    """The name in train.recompute under which the whole part is recomputed."""
    recomputes = frozenset({"mlp"})
    holds_norm = "mlp.linear_fc1"

    @property
    def only_local(self) -> str | None:
        return None if self.activation == "silu" else f"MLPs with {self.activation}"

    @property
    def gated(self) -> bool:
        return self.activation != "relu2"

    def tensors(self, prefix: str, layer: int) -> Iterator[Tensor]:
        at = prefix + "mlp."
        if self.gated:
            yield Tensor(at + "gate_proj.weight", (self.ffn, self.hidden), "gate", layer)
        yield Tensor(at + "up_proj.weight", (self.ffn, self.hidden), "up", layer)
        yield Tensor(at + "down_proj.weight", (self.hidden, self.ffn), "down", layer)

    def with_experts(self, experts: int) -> Mlp:
        return self

    def fields(self) -> dict[str, Any]:
        return {"ffn_hidden_size": self.ffn, "gated_linear_unit": self.gated}

    def on_megatron(self, rank: LayerOnRank, of: LayerTensors) -> None:
        rank.rows("mlp.linear_fc1.weight", *self._up(of.roles))
        rank.columns("mlp.linear_fc2.weight", of.roles["down"])

    def divided(self) -> list[Divided]:
        return [Divided("tensor", "MLP columns (intermediate_size)", self.ffn)]

    def on_engine(self, rank: LayerOnEngine, of: LayerTensors) -> None:
        rank.mlp(self._up(of.roles), of.roles["down"], rank.padded(self.ffn))

    def _up(self, roles: Roles) -> list[Tensor]:
        """Returns the matrices before the activation."""
        return [roles["gate"], roles["up"]] if self.gated else [roles["up"]]

    def unmet_on_engine(self, sizes: EngineSizes, device: str) -> Iterator[Unmet]:
        if device != "cpu" and self.ffn % sizes.tensor:  # on CPUs SGLang pads it
            yield Unmet(f"ffn: {self.ffn}", f"a multiple of {sizes.tensor}")

    def work(self) -> LayerWork:
        return LayerWork(mlp=(4.0 + 2.0 * self.gated) * self.hidden * self.ffn)

    def engine_columns(self, sizes: EngineSizes) -> float:
        """Returns the elements that an engine rank makes of a token of a prefill."""
        return 3 * self.ffn / sizes.tensor

    def kept_bytes(self, its: Pass) -> int:
        """Returns the bytes of the first product (gate and up) and the second's input; two tensors more
        on CPUs and of other activations than SiLU, which nothing fuses."""
        fused = its.device != "cpu" and self.activation == "silu"
        tensors = (3 if fused else 5) if self.gated else 2
        return int(its.tokens * self.ffn / its.layout.tensor * tensors * its.element_bytes)

    def widest(self, its: Pass) -> tuple[int, int]:
        """Returns the rows and columns of the product before the second projection, on one rank."""
        return its.tokens, self.ffn // its.layout.tensor

    def forward_bytes(self, its: Pass) -> int:
        """Returns the bytes of a pass without gradients. With adapters: the product, the adapter's, and their sum."""
        product = its.tokens * self.ffn // its.layout.tensor * its.element_bytes
        return 6 * product if its.adapters else max(3 * product, self.kept_bytes(its))
