"""Gated delta nets (arXiv:2412.06464): linear attention, whose state does not grow with the sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megagrpo.weights.families.parts.part import Divided, LayerTensors, LayerWork, Pass, Rows, Tensor, Unmet

if TYPE_CHECKING:
    from megagrpo.weights.sides.megatron_rank import LayerOnRank
    from megagrpo.weights.sides.sglang import EngineSizes, LayerOnEngine

CHUNK = 64
"""Tokens that are mixed by matrices of this size (megatron/delta_net.py); the state goes from chunk to chunk."""


@dataclass(frozen=True)
class DeltaNet:
    """A state of key_dim x value_dim for each value head. A key head serves value_heads / key_heads value heads.

    `kernel` counts the tokens that the causal convolution of queries, keys and values sees.
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    rope = window = None
    adapts = False
    exchanges_heads = True
    only_local = "gated delta nets"
    recomputes = frozenset[str]()
    holds_norm = None

    @property
    def groups(self) -> int:
        return self.key_heads

    @property
    def head_dim(self) -> int:
        return self.key_dim

    @property
    def mixed(self) -> int:
        """Returns the elements that the convolution sees: of queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def keys(self) -> int:
        """Returns the elements of all query heads, and of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    def tensors(self, prefix: str, layer: int) -> Iterator[Tensor]:
        at = prefix + "linear_attn."
        rows = {"q": self.keys, "k": self.keys, "v": self.values, "z": self.values}
        for name, count in (rows | {"b": self.value_heads, "a": self.value_heads}).items():
            yield Tensor(f"{at}in_proj_{name}.weight", (count, self.hidden), f"delta_{name}", layer)
        for name in "qkv":
            yield Tensor(f"{at}conv_{name}.weight", (rows[name], 1, self.kernel), f"conv_{name}", layer)
        yield Tensor(at + "A_log", (self.value_heads,), "A_log", layer)
        yield Tensor(at + "dt_bias", (self.value_heads,), "dt_bias", layer)
        yield Tensor(at + "norm.weight", (self.value_dim,), "delta_norm", layer)
        yield Tensor(at + "out_proj.weight", (self.hidden, self.values), "delta_o", layer)

    # --- Megatron -----------------------------------------------------------------------------------------------------

    def fields(self) -> dict[str, Any]:
        return {}

    def on_megatron(self, rank: LayerOnRank, of: LayerTensors) -> None:
        at, roles = "self_attention.", of.roles
        rank.rows(at + "in_proj.weight", *(roles[f"delta_{name}"] for name in "qkvzba"))
        rank.rows(at + "conv", *(roles[f"conv_{name}"] for name in "qkv"))
        rank.rows(at + "A_log", roles["A_log"])
        rank.rows(at + "dt_bias", roles["dt_bias"])
        rank.whole(at + "out_norm.weight", roles["delta_norm"])
        rank.columns(at + "out_proj.weight", roles["delta_o"])

    def divided(self) -> list[Divided]:
        return [Divided("tensor", "key heads of linear attention (linear_num_key_heads)", self.key_heads)]

    def unmet(self, tensor: int, fused: bool) -> Iterator[Unmet]:
        yield from ()

    # --- SGLang -------------------------------------------------------------------------------------------------------

    def on_engine(self, rank: LayerOnEngine, of: LayerTensors) -> None:
        def rows(kind: str, names: str, fused: tuple[str, str], runs: int = 1) -> None:
            parts = [(its := rank.shard(of.roles[f"{kind}_{name}"]), its.count // runs) for name in names]
            by_run = [Rows(its.tensor, its.start + run * count, count) for run in range(runs) for its, count in parts]
            rank.rows(by_run, fused)

        heads = self.key_heads // rank.group if rank.of_class.by_key_head else 1
        rows("delta", "qkvz", ("in_proj_q", "in_proj_qkvz"), heads)
        rows("delta", "ba", ("in_proj_b", "in_proj_ba"), heads)
        rows("conv", "qkv", ("conv_q", "conv1d"))
        rank.rows([rank.shard(of.roles["A_log"])], wide=True)
        rank.rows([rank.shard(of.roles["dt_bias"])])
        rank.columns(of.roles["delta_o"])

    def unmet_on_engine(self, sizes: EngineSizes, device: str) -> Iterator[Unmet]:
        if device == "cpu":
            yield Unmet("a gated delta net", "a GPU: SGLang's kernels for it are Triton's")
        elif self.key_heads % (group := sizes.tensor // sizes.attention_data):
            yield Unmet(f"key heads of linear attention: {self.key_heads}", f"a multiple of {group}")

    # --- costs --------------------------------------------------------------------------------------------------------

    def work(self) -> LayerWork:
        projections = 2.0 * self.hidden * (self.mixed + 2 * self.values + 2 * self.value_heads)
        projections += 2.0 * self.kernel * self.mixed
        states = self.value_heads * (
            6.0 * self.key_dim * self.value_dim + 4.0 * CHUNK * (self.key_dim + self.value_dim)
        )
        return LayerWork(projections=projections + states)

    def cached_elements(self, tensor: int) -> int:
        return 0

    def state_bytes(self, tensor: int, element_bytes: int) -> int:
        """Returns the bytes of a sequence on each of `tensor` ranks of an engine: a float32 state for each value head,
        and the last tokens that the convolution sees."""
        states = 4 * self.value_heads * self.key_dim * self.value_dim
        return (states + (self.kernel - 1) * self.mixed * element_bytes) // tensor

    def derived_elements(self, ranks: int) -> int:
        return 0

    def engine_columns(self, sizes: EngineSizes) -> float:
        return (2 * self.mixed + 2 * self.values) / sizes.tensor

    def core(self, context: int, longest: int) -> tuple[str, str | None]:
        return "gated delta nets", "flash-linear-attention's kernels if installed, else torch in float32"

    def exchanged(self, tensor: int) -> tuple[float, float]:
        return (self.mixed + self.values) / tensor, 0.0

    def kept_bytes(self, its: Pass) -> int:
        """Returns the bytes of projections, the output, its gate and its norm's result, and of what lies between.

        Kernels of flash-linear-attention keep queries and keys of each value head, values and a matrix for each chunk.
        torch keeps, in float32: what is convolved, before and after its activation; keys and queries in nine forms; the
        matrices of a chunk, its solution and the state before it.
        """
        heads, chunk = self.value_heads, min(CHUNK, its.longest)
        if its.device == "cuda":
            columns = 2 * self.mixed + 2 * heads * self.key_dim + heads * chunk + 2 * self.values
            held = columns * its.element_bytes + 16.0 * heads
        else:
            of_head = 5 * chunk + 9 * self.key_dim + 2 * self.value_dim + self.key_dim * self.value_dim / chunk + 8
            held = 3 * self.values * its.element_bytes + 4 * (3 * self.mixed + heads * of_head)
        return int(its.tokens / its.layout.tensor * held)

    def score_bytes(self, its: Pass) -> int:
        return 0

    def forward_bytes(self, its: Pass) -> int:
        return self.kept_bytes(its)  # names in megatron/delta_net.py hold most of it
