"""Attention by query groups (arXiv:2305.13245), with its rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megagrpo.weights.families.parts.part import Divided, LayerTensors, LayerWork, Pass, Roles, Rows, Tensor, Unmet

if TYPE_CHECKING:
    from megagrpo.weights.sides.megatron_rank import LayerOnRank
    from megagrpo.weights.sides.sglang import EngineSizes, LayerOnEngine


CAPPED_SCORES = 2**26
"""Capped scores that live at once on a training rank."""


@dataclass(frozen=True)
class Yarn:
    """Scaling of a rotary embedding (arXiv:2309.00071), with the two factors of DeepSeek for its magnitude."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    magnitude: float | None = None
    """The factor of cosines and sines (`attention_factor`). None: it follows from the other factors."""
    truncate: bool = True
    """The range of interpolated frequencies begins and ends at whole indices."""


@dataclass(frozen=True)
class LongRope:
    """Scaling of a rotary embedding (arXiv:2402.13753): a divisor of each frequency, of two sets of them.

    A sequence of more than `original_max_positions` tokens takes the long set, with all its tokens. `factor` is the
    ratio of the longest context to the original one.
    """

    factor: float
    original_max_positions: int
    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. `llama3` scaling (arXiv:2407.21783) when `factor` is not None; at most one scaling."""

    theta: float
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    yarn: Yarn | None = None
    long: LongRope | None = None
    linear: float = 1.0
    """Positions are divided by this."""
    part: float = 1.0
    """The first part of a head, which is rotated."""
    pairs: bool = False
    """Neighbouring elements are rotated together, in place of the two halves."""

    @property
    def sampled_max(self) -> int | None:
        """Returns the most tokens of a sequence that is sampled. longrope rotates a longer one anew, all its tokens."""
        return None if self.long is None else self.long.original_max_positions


@dataclass(frozen=True)
class Temperature:
    """The factor 1 + beta ln(1 + floor(position / positions)) of a query."""

    beta: float
    positions: int


@dataclass(frozen=True)
class Attention:
    """Attention in which each of `groups` keys and values serves heads / groups queries, all of `head_dim` elements."""

    hidden: int
    heads: int
    groups: int
    head_dim: int
    rope: Rope | None
    bias: bool = False
    """Biases of the projections to queries, keys and values."""
    output_bias: bool = False
    norm: Literal["head", "projection"] | None = None
    """RMSNorm of queries and keys: of each head, or of all heads together."""
    gate: bool = False
    """The output is multiplied by the sigmoid of a projection of its own (arXiv:2505.06708)."""
    window: int | None = None
    """A query sees this many keys at most: its own, and those before it."""
    sinks: bool = False
    """A trained score for each head takes its part of the softmax, without a value."""
    scale: float | None = None
    """The factor of scores, 1 / sqrt(head_dim) by default."""
    score_cap: float | None = None
    """Scores are cap x tanh(score / cap)."""
    temperature: Temperature | None = None

    adapts = True
    exchanges_heads = False
    """Context ranks have all tokens of some heads, in place of all keys and values."""
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

    @property
    def only_local(self) -> str | None:
        """Returns what Transformer Engine's layers do not have of it; None if they have all."""
        rope = self.rope
        lacking = {
            "windows": self.window,
            "sinks": self.sinks,
            "capped scores": self.score_cap,
            "scores by a factor of their own": self.scale,
            "queries with a temperature": self.temperature,
            "gates of attention": self.gate,
            "biases after attention": self.output_bias,
            "norms of all heads together": self.norm == "projection",
            "layers without a rotary embedding": rope is None,
            "rotation of neighbouring pairs": rope and rope.pairs,
            "rotation of a part of a head": rope and rope.part < 1,
            "yarn or longrope": rope and (rope.yarn or rope.long),
        }
        return next((name for name, has in lacking.items() if has), None)

    def tensors(self, prefix: str, layer: int) -> Iterator[Tensor]:
        at, key = prefix + "self_attn.", (self.keys,)
        norms = ((self.head_dim,), (self.head_dim,)) if self.norm == "head" else ((self.queries,), key)
        yield Tensor(at + "q_proj.weight", (self.queries, self.hidden), "q", layer)
        if self.gate:
            yield Tensor(at + "gate_proj.weight", (self.queries, self.hidden), "attention_gate", layer)
        yield Tensor(at + "k_proj.weight", (self.keys, self.hidden), "k", layer)
        yield Tensor(at + "v_proj.weight", (self.keys, self.hidden), "v", layer)
        if self.bias:
            yield Tensor(at + "q_proj.bias", (self.queries,), "q_bias", layer)
            yield Tensor(at + "k_proj.bias", key, "k_bias", layer)
            yield Tensor(at + "v_proj.bias", key, "v_bias", layer)
        if self.norm:
            yield Tensor(at + "q_norm.weight", norms[0], "q_norm", layer)
            yield Tensor(at + "k_norm.weight", norms[1], "k_norm", layer)
        if self.sinks:
            yield Tensor(at + "sinks", (self.heads,), "sinks", layer)
        yield Tensor(at + "o_proj.weight", (self.hidden, self.queries), "o", layer)
        if self.output_bias:
            yield Tensor(at + "o_proj.bias", (self.hidden,), "o_bias", layer)

    # --- Megatron -----------------------------------------------------------------------------------------------------

    def fields(self) -> dict[str, Any]:
        """Returns the fields of Megatron's TransformerConfig."""
        return {
            "num_attention_heads": self.heads,
            "num_query_groups": self.groups,
            "kv_channels": self.head_dim,
            "add_qkv_bias": self.bias,
            "qk_layernorm": self.norm is not None,
            **({"attention_output_gate": True} if self.gate else {}),
        }

    def on_megatron(self, rank: LayerOnRank, of: LayerTensors) -> None:
        roles = of.roles
        for suffix, rest in (("", (self.hidden,)), *([("_bias", ())] if self.bias else [])):
            name = "self_attention.linear_qkv." + ("bias" if suffix else "weight")
            rank.evenly(name, self._by_group(roles, suffix), rest)
        norm = rank.whole if self.norm == "head" else rank.rows
        if self.norm:
            norm("self_attention.q_layernorm.weight", roles["q_norm"])
            norm("self_attention.k_layernorm.weight", roles["k_norm"])
        if self.sinks:
            rank.rows("self_attention.core_attention.softmax_offset", roles["sinks"])
        rank.columns("self_attention.linear_proj.weight", roles["o"])
        if self.output_bias:
            rank.whole("self_attention.linear_proj.bias", roles["o_bias"])

    def _by_group(self, roles: Roles, suffix: str) -> list[Rows]:
        """Returns the rows of the fused projection: for each group its queries, their gates, its key and its value.

        With more tensor ranks than groups Megatron cuts them evenly, through the middle of a group, and gathers the
        activations (megatron.core.transformer.attention, get_query_key_value_tensors).
        """
        queries, dim = self.queries // self.groups, self.head_dim
        counts = {"q": queries, **({"attention_gate": queries} if self.gate else {}), "k": dim, "v": dim}
        return [
            Rows(roles[role + suffix], group * count, count)
            for group in range(self.groups)
            for role, count in counts.items()
        ]

    def divided(self) -> list[Divided]:
        sizes = [Divided("tensor", "attention heads (num_attention_heads)", self.heads)]
        if self.norm == "projection":
            sizes.append(Divided("tensor", "query groups, whose keys have one norm (num_key_value_heads)", self.groups))
        return sizes

    def unmet(self, tensor: int, fused: bool) -> Iterator[Unmet]:
        """Yields what else `tensor` ranks of Megatron's layers must divide."""
        if (rows := self.queries + 2 * self.keys) % tensor:
            yield Unmet(f"rows of q, k and v together: {rows}", f"a multiple of {tensor}")
        if self.groups % tensor and tensor % self.groups:
            yield Unmet(f"query groups (key-value heads): {self.groups}", f"a multiple or a divisor of {tensor}")

    # --- SGLang -------------------------------------------------------------------------------------------------------

    def on_engine(self, rank: LayerOnEngine, of: LayerTensors) -> None:
        for suffix in ("", *(["_bias"] if self.bias else [])):
            rank.rows(self._by_head(rank, of.roles, suffix), ("q_proj", "qkv_proj"))
        if self.norm == "projection" and rank.of_class.cuts_norms:
            rank.rows([rank.shard(of.roles["q_norm"])])
            rank.rows([self._keys(rank, of.roles["k_norm"])])
        elif self.norm:
            rank.whole(of.roles["q_norm"])
            rank.whole(of.roles["k_norm"])
        if self.sinks:
            rank.rows([rank.shard(of.roles["sinks"])])
        rank.columns(of.roles["o"])
        if self.output_bias:
            rank.whole(of.roles["o_bias"])

    def _by_head(self, rank: LayerOnEngine, roles: Roles, suffix: str) -> list[Rows]:
        """Returns this rank's queries, each with its gate behind it, then its keys, then its values."""
        dim, heads = self.head_dim, self.heads // rank.group
        first = rank.group_rank * heads
        queries = [Rows(roles["q" + suffix], first * dim, heads * dim)]
        if self.gate:
            of_head = ("q", "attention_gate")
            queries = [Rows(roles[role], head * dim, dim) for head in range(first, first + heads) for role in of_head]
        return queries + [self._keys(rank, roles[role + suffix]) for role in ("k", "v")]

    def _keys(self, rank: LayerOnEngine, tensor: Tensor) -> Rows:
        """Returns the rows of this rank's keys. Several ranks have the same, if there are more ranks than keys."""
        first, count = rank.group_rank * self.groups // rank.group, max(1, self.groups // rank.group)
        return Rows(tensor, first * self.head_dim, count * self.head_dim)

    def unmet_on_engine(self, sizes: EngineSizes, device: str) -> Iterator[Unmet]:
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
        projections += 2.0 * self.hidden * self.queries * self.gate
        return LayerWork(projections=projections, pairs=pairs, decoded_pairs=2 * pairs)

    def cached_elements(self, tensor: int) -> int:
        """Returns the elements of a token's keys and values on each of `tensor` ranks of an engine."""
        return 2 * max(1, self.groups // tensor) * self.head_dim

    def state_bytes(self, tensor: int, element_bytes: int) -> int:
        """Returns the bytes of a whole sequence on each of `tensor` ranks of an engine, besides those of its tokens."""
        return 0

    def derived_elements(self, ranks: int) -> int:
        """Returns the elements that an engine rank makes of its weights, of `ranks` that share the attention."""
        return 0

    def engine_columns(self, sizes: EngineSizes) -> float:
        """Returns the elements that an engine rank makes of a token of a prefill."""
        return 4 * self.heads / sizes.tensor * self.head_dim

    def core(self, context: int, longest: int) -> tuple[str, str | None]:
        """Returns its name in a plan, and what computes it in Megatron's local layers on GPUs (megatron/attention.py)
        for sequences of `longest` tokens. None: a kernel of torch's that takes its heads."""
        near = self.window is not None and self.window < longest
        name = f"windows of {self.window}" if near else "full attention"
        if self.score_cap is not None:
            return f"{name} with capped scores", "torch in float32, no fused kernel, scores computed again backwards"
        blocks = "torch's memory-efficient attention in blocks, of which half the scores are masked"
        return name, blocks if near and context == 1 else None

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
        if self.gate:
            columns += 2 * queries  # the product, and the output before the gate
        if self.window is not None and self.window < its.longest and cores:
            columns += 2 * queries + 4 * (
                keys if its.device == "cpu" else queries
            )  # blocks, each with two blocks' keys
        wide = 4 * self.heads / tensor if cores else 0  # logarithms of the softmax's sums, float32
        wide += 4 * queries * self.gate
        return int(its.tokens * (columns * its.element_bytes + wide))

    def score_bytes(self, its: Pass) -> int:
        """Returns the bytes of capped scores, which are float32 and in three forms, of some queries at a time."""
        return 0 if self.score_cap is None else 12 * self._capped(its)

    def _capped(self, its: Pass) -> int:
        """Returns the number of capped scores that live at once."""
        keys = its.longest if self.window is None else min(its.longest, 2 * self.window)
        return min(CAPPED_SCORES, its.tokens * self.heads // its.layout.tensor * keys)

    def forward_bytes(self, its: Pass) -> int:
        """Returns the bytes of the query-key-value product, its normed part, and the rotated queries in float32, or of
        capped scores (megagrpo/megatron/attention.py). Fused kernels keep nothing between."""
        if its.transformer_engine:
            return 0
        if self.score_cap is not None:
            return 10 * self._capped(its)
        queries, keys = self._of_rank(its.layout.tensor)
        columns = queries * (1 + self.gate) + 2 * keys + (queries + keys if self.norm else 0)
        copies = 3 if its.element_bytes == 4 else 4  # queries wide, times the cosine, in halves swapped, times the sine
        return int(its.tokens * (columns * its.element_bytes + 4 * copies * queries + 8 * self.head_dim))

    def _of_rank(self, tensor: int) -> tuple[float, float]:
        """Returns the elements of a token's queries and of its keys on each of `tensor` training ranks."""
        return self.queries / tensor, max(1.0, self.groups / tensor) * self.head_dim
