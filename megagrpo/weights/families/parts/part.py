"""A part of a layer, and the sides, ranks and passes that a part describes itself to.

A layer has a part that mixes tokens (attention), and one that works on each token (an MLP or experts). A part is
a frozen dataclass of sizes. It states everything that depends on them: tensors, fields of Megatron's config, boxes on
each side, sizes that ranks must divide, operations, and bytes. Nothing else asks which parts a model has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import add
from typing import Literal, NamedTuple

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.weights.boxes import Box

Role = str
"""The place of a tensor in its part, such as q, input_norm or expert_gate."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the model: its name, its shape [out, in] or [n], and its role."""

    name: str
    shape: tuple[int, ...]
    role: Role
    layer: int | None = None
    expert: int | None = None

    @property
    def box(self) -> Box:
        """Returns the box of the whole tensor."""
        return Box(self.name, (0,) * len(self.shape), self.shape)

    @property
    def trained(self) -> bool:
        """Returns whether the tensor has gradients. A router's bias keeps its loaded values."""
        return self.role != "router_bias"

    def stored_as(self, dtype: str) -> str:
        """Returns its dtype on every side: `dtype`, the model's, but float32 for routers' biases and value heads."""
        return "float32" if self.role in ("router_bias", "value_head") else dtype

    @property
    def optional(self) -> bool:
        """Returns whether a model directory may lack the tensor. A value head then starts from zeros."""
        return self.role == "value_head"


Roles = Mapping[Role, Tensor]


@dataclass(frozen=True)
class LayerTensors:
    """The tensors that a layer has once, and those of each expert in order (none in a dense layer)."""

    roles: Roles
    experts: tuple[Roles, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` consecutive rows (axis 0) of a tensor, from row `start`. Padding, where `tensor` is None."""

    tensor: Tensor | None
    start: int
    count: int


def all_rows(tensor: Tensor) -> Rows:
    return Rows(tensor, 0, tensor.shape[0])


# --- sizes and costs --------------------------------------------------------------------------------------------------


class Divided(NamedTuple):
    """A size of the model that a parallel size must divide, with either of Megatron's layer specs."""

    axis: Literal["tensor", "expert", "expert_tensor"]
    name: str
    size: int


class Unmet(NamedTuple):
    """A demand that a layout does not meet."""

    given: str
    needed: str


@dataclass(frozen=True)
class LayerWork:
    """Operations of a forward pass through one layer, or a part of it, per token: two for each weight that it meets."""

    projections: float = 0.0
    mlp: float = 0.0
    """With experts: of the shared ones and the router."""
    experts: float = 0.0
    pairs: float = 0.0
    """Per pair of tokens."""
    decoded_pairs: float = 0.0
    """Per pair of tokens, where an engine decodes a token: latent attention then projects no latents up."""
    up: float = 0.0
    """The part of the projections that leads from latents up to heads."""
    shared: float = 0.0
    """The shared experts' part of mlp."""

    @property
    def linear(self) -> float:
        return self.projections + self.mlp + self.experts

    def __add__(self, other: LayerWork) -> LayerWork:
        return LayerWork(*map(add, vars(self).values(), vars(other).values()))


@dataclass(frozen=True)
class Pass:
    """A pass of one microbatch through the layers of one training rank."""

    layout: ParallelLayout
    hidden: int
    element_bytes: int
    """Bytes of a weight or an activation: 2 or 4."""

    tokens: int
    """Tokens of the microbatch on this context rank, padding included."""

    longest: int
    """Tokens of its longest sequence, on all context ranks together."""

    device: str
    """cpu or cuda. On CPUs, norms and gates are made of several operations, which keep their intermediate results."""

    transformer_engine: bool
    """True: its layers, with flash attention and fused norms. False: Megatron's local ones with PackedAttention."""

    modules: frozenset[str] = frozenset()
    """The modules that the backward pass recomputes."""

    adapters: bool = False
    """Weights are frozen, and have low-rank adapters (train.lora)."""

    expert_imbalance: float = 1.0
    """Tokens of the busiest rank's experts over the mean."""

    @property
    def tokens_of_rank(self) -> int:
        """Returns the tokens of one rank between a layer's parallel parts, where sequence parallelism splits them."""
        return -(-self.tokens // self.layout.tensor)

    @property
    def hidden_bytes(self) -> int:
        """Returns the bytes of hidden states [tokens_of_rank, hidden]."""
        return self.tokens_of_rank * self.hidden * self.element_bytes

    @property
    def gathered_bytes(self) -> int:
        """Returns the bytes of hidden states [tokens, hidden]."""
        return self.tokens * self.hidden * self.element_bytes

    def norm_bytes(self, width: int) -> int:
        """Returns the bytes of input, output and reciprocal root (float32), plus the intermediate results on CPUs."""
        return self.tokens_of_rank * (width * (2 * self.element_bytes + self.between_bytes()) + 4)

    def between_bytes(self) -> int:
        """Returns the intermediate bytes for each element of a norm on CPUs; 0 elsewhere. They are the scaled input, if
        the norm's weight has a gradient, and a float32 copy of a narrower input."""
        if self.device != "cpu":
            return 0
        return (0 if self.adapters else self.element_bytes) + (4 if self.element_bytes < 4 else 0)
