"""Attention by query groups (arXiv:2305.13245), with its rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megagrpo.weights.families.parts.part import Divided, LayerTensors, LayerWork, Pass, Rows, Tensor, Unmet

if TYPE_CHECKING:
    from megagrpo.weights.sides.megatron_rank import LayerOnRank
    from megagrpo.weights.sides.sglang import EngineSizes, LayerOnEngine


@dataclass(frozen=True)
class Yarn:
    """Scaling of a rotary embedding (arXiv:2309.00071), with the two factors of DeepSeek for its magnitude."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. `llama3` scaling (arXiv:2407.21783) when `factor` is not None."""

    theta: float
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    yarn: Yarn | None = None


@dataclass(frozen=True)
class Attention:
    """Attention in which each of `groups` keys and values serves heads / groups queries, all of `head_dim` elements."""

    hidden: int
    heads: int
    groups: int
    head_dim: int
    rope: Rope
    bias: bool = False
    """Biases of the projections to queries, keys and values."""
    norm: bool = False
    """RMSNorm of each query and key head."""

    adapts = True
    recomputes = frozenset({"core_attn"})
    holds_norm = "self_attention.linear_qkv"
    """Transformer Engine's linear layer that holds the norm before this part."""

    @property
    def queries(self) -> int:
        """Returns the elements of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Returns the elements of all key heads, and of all value heads."""
        return self.groups * self.head_dim

    @property
    def value_dim(self) -> int:
        return self.head_dim

    def tensors(self, prefix: str, layer: int) -> Iterator[Tensor]:
        at, key = prefix + "self_attn.", (self.keys,)
        yield Tensor(at + "q_proj.weight", (self.queries, self.hidden), "q", layer)
        yield Tensor(at + "k_proj.weight", (self.keys, self.hidden), "k", layer)
        yield Tensor(at + "v_proj.weight", (self.keys, self.hidden), "v", layer)
        if self.bias:
            yield Tensor(at + "q_proj.bias", (self.queries,), "q_bias", layer)
            yield Tensor(at + "k_proj.bias", key, "k_bias", layer)
            yield Tensor(at + "v_proj.bias", key, "v_bias", layer)
        if self.norm:
            yield Tensor(at + "q_norm.weight", (self.head_dim,), "q_norm", layer)
            yield Tensor(at + "k_norm.weight", (self.head_dim,), "k_norm", layer)
        yield Tensor(at + "o_proj.weight", (self.hidden, self.queries), "o", layer)

    # --- Megatron -----------------------------------------------------------------------------------------------------

    def fields(self) -> dict[str, Any]:
        """Returns the fields of Megatron's TransformerConfig."""
        return {
            "num_attention_heads": self.heads,
            "num_query_groups": self.groups,
            "kv_channels": self.head_dim,
            "add_qkv_bias": self.bias,
            "qk_layernorm": self.norm,
        }

    def on_megatron(self, rank: LayerOnRank, of: LayerTensors) -> None:
        roles = of.roles
        rank.evenly(
            "self_attention.linear_qkv.weight", self._by_group(roles["q"], roles["k"], roles["v"]), (self.hidden,)
        )
        if self.bias:
            biases = self._by_group(roles["q_bias"], roles["k_bias"], roles["v_bias"])
            rank.evenly("self_attention.linear_qkv.bias", biases, ())
        if self.norm:
            rank.whole("self_attention.q_layernorm.weight", roles["q_norm"])
            rank.whole("self_attention.k_layernorm.weight", roles["k_norm"])
        rank.columns("self_attention.linear_proj.weight", roles["o"])

    def _by_group(self, q: Tensor, k: Tensor, v: Tensor) -> list[Rows]:
        """Returns the rows of the fused projection: for each group its queries, its key and its value.

        With more tensor ranks than groups Megatron cuts them evenly, through the middle of a group, and gathers the
        activations (megatron.core.transformer.attention, get_query_key_value_tensors).
        """
        queries, dim = self.queries // self.groups, self.head_dim
        return [
            rows
            for group in range(self.groups)
            for rows in (Rows(q, group * queries, queries), Rows(k, group * dim, dim), Rows(v, group * dim, dim))
        ]

    def divided(self) -> list[Divided]:
        return [Divided("tensor", "attention heads (num_attention_heads)", self.heads)]

    def unmet(self, tensor: int, fused: bool) -> Iterator[Unmet]:
        """Yields what else `tensor` ranks of Megatron's layers must divide."""
        if (rows := self.queries + 2 * self.keys) % tensor:
            yield Unmet(f"rows of q, k and v together: {rows}", f"a multiple of {tensor}")
        if self.groups % tensor and tensor % self.groups:
            yield Unmet(f"query groups (key-value heads): {self.groups}", f"a multiple or a divisor of {tensor}")

    # --- SGLang -------------------------------------------------------------------------------------------------------

    def on_sglang(self, rank: LayerOnEngine, of: LayerTensors) -> None:
        roles = of.roles
        rank.rows(self._by_head(rank, roles["q"], roles["k"], roles["v"]), ("q_proj", "qkv_proj"))
        if self.bias:
            rank.rows(self._by_head(rank, roles["q_bias"], roles["k_bias"], roles["v_bias"]), ("q_proj", "qkv_proj"))
        rank.columns(roles["o"])

    def _by_head(self, rank: LayerOnEngine, q: Tensor, k: Tensor, v: Tensor) -> list[Rows]:
        """Returns this rank's queries, then its keys, then its values."""
        queries, heads = self.queries // rank.group, max(1, self.groups // rank.group)
        first = rank.group_rank * self.groups // rank.group
        keys = [Rows(tensor, first * self.head_dim, heads * self.head_dim) for tensor in (k, v)]
        return [Rows(q, rank.group_rank * queries, queries), *keys]

    def unmet_on_sglang(self, sizes: EngineSizes, device: str) -> Iterator[Unmet]:
        """Yields what the ranks of an engine must divide, or those of them that share the attention."""
        tensor, group = sizes.tensor, sizes.tensor // sizes.attention_data
        if self.heads % (ranks := tensor if device == "cpu" else group):
            yield Unmet(f"attention heads: {self.heads}", f"a multiple of {ranks}")
        if device == "cpu" and self.groups % tensor:
            # SGLang pads the heads there instead of repeating them, and then fails to load the weights.
            yield Unmet(f"key-value heads: {self.groups}", f"a multiple of {tensor}, on the CPU")
        elif self.groups % group and group % self.groups:
            yield Unmet(f"key-value heads: {self.groups}", f"a multiple or a divisor of {group}")

    # --- costs --------------------------------------------------------------------------------------------------------

    def work(self) -> LayerWork:
        pairs = 2.0 * self.queries
        projections = 4.0 * self.hidden * self.head_dim * (self.heads + self.groups)
        return LayerWork(projections=projections, pairs=pairs, decoded_pairs=2 * pairs)

    def cached_elements(self, tensor: int) -> int:
        """Returns the elements of a token's keys and values on each of `tensor` ranks of an engine."""
        return 2 * max(1, self.groups // tensor) * self.head_dim

    def derived_elements(self, ranks: int) -> int:
        """Returns the elements that an engine rank makes of its weights, of `ranks` that share the attention."""
        return 0

    def engine_columns(self, sizes: EngineSizes) -> float:
        """Returns the elements that an engine rank makes of a token of a prefill."""
        return 4 * self.heads / sizes.tensor * self.head_dim

    def exchanged(self, tensor: int) -> tuple[float, float]:
        """Returns the elements of a token, on each of `tensor` ranks, that context ranks exchange: of queries with
        outputs, and of keys with values."""
        queries, keys = self._of_rank(tensor)
        return 2 * queries, 2 * keys

    def kept_bytes(self, its: Pass) -> int:
        """Returns the bytes that a training rank keeps for the backward pass."""
        cores = "core_attn" not in its.modules
        tensor, context = its.layout.tensor, its.layout.context
        queries, keys = self._of_rank(tensor)
        columns = queries  # the output, which the projection after it keeps
        if its.transformer_engine:
            columns += queries + 2 * keys  # what the core keeps, or what it is recomputed from
        elif not cores:
            columns += 2 * queries + 2 * keys  # the product, and queries in an order of their own
        elif context == 1:
            columns += 2 * queries + 3 * keys  # rotated queries and keys, values within the product of all three
        else:
            # Keys and values of all context ranks, in the order of their sequences; a mask [queries, keys] as numbers.
            columns += queries + 2 * keys * context + its.longest
        if self.norm and its.transformer_engine:
            columns += queries + keys
        elif self.norm:
            # Keys are normed where they lie in the product, queries as a copy; outputs are kept only if the core is
            # recomputed from them: rotating them keeps nothing.
            columns += queries + (0 if cores else keys) + (queries + keys) * its.between_bytes() / its.element_bytes
        sums = 4 * self.heads / tensor if cores else 0  # logarithms of the softmax's sums, float32
        return int(its.tokens * (columns * its.element_bytes + sums))

    def score_bytes(self, its: Pass) -> int:
        return 0

    def rotation_bytes(self, its: Pass) -> int:
        """Returns the bytes of the query-key-value product, its normed part, and the rotated queries in float32
        (megagrpo/megatron/attention.py). Fused kernels keep nothing between."""
        if its.transformer_engine:
            return 0
        queries, keys = self._of_rank(its.layout.tensor)
        columns = queries + 2 * keys + (queries + keys if self.norm else 0)
        copies = 3 if its.element_bytes == 4 else 4  # queries wide, times the cosine, in halves swapped, times the sine
        return int(its.tokens * (columns * its.element_bytes + 4 * copies * queries + 8 * self.head_dim))

    def _of_rank(self, tensor: int) -> tuple[float, float]:
        """Returns the elements of a token's queries and of its keys on each of `tensor` training ranks."""
        return self.queries / tensor, max(1.0, self.groups / tensor) * self.head_dim
