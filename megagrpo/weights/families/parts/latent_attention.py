"""Multi-head latent attention (arXiv:2405.04434)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megagrpo.weights.families.parts.attention import Rope
from megagrpo.weights.families.parts.part import Divided, LayerTensors, LayerWork, Pass, Tensor, Unmet, all_rows

if TYPE_CHECKING:
    from megagrpo.weights.sides.megatron_rank import LayerOnRank
    from megagrpo.weights.sides.sglang import EngineSizes, LayerOnEngine

NORM_EPSILON = 1e-6
"""The epsilon of the norms of the latents. rms_norm_eps does not change it (transformers, DeepSeek's code)."""


@dataclass(frozen=True)
class LatentAttention:
    """Attention in which queries, keys and values are projected down, normed and up again.

    A head of queries or keys has `plain_dim` elements without position and `rotary_dim` elements with it. All heads
    share the rotary part of the keys. `query_rank` is None where one matrix projects the queries.
    """

    hidden: int
    heads: int
    query_rank: int | None
    key_value_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    rope: Rope

    temperature = window = only_local = None
    adapts = exchanges_heads = False
    recomputes = frozenset({"core_attn", "mla_up_proj"})
    holds_norm = None

    @property
    def head_dim(self) -> int:
        """Returns the elements of a query or key head."""
        return self.plain_dim + self.rotary_dim

    @property
    def groups(self) -> int:
        return self.heads

    def tensors(self, prefix: str, layer: int) -> Iterator[Tensor]:
        at, queries, rank = prefix + "self_attn.", self.heads * self.head_dim, self.key_value_rank
        if self.query_rank is None:
            yield Tensor(at + "q_proj.weight", (queries, self.hidden), "q", layer)
        else:
            yield Tensor(at + "q_a_proj.weight", (self.query_rank, self.hidden), "q_down", layer)
            yield Tensor(at + "q_a_layernorm.weight", (self.query_rank,), "q_down_norm", layer)
            yield Tensor(at + "q_b_proj.weight", (queries, self.query_rank), "q_up", layer)
        yield Tensor(at + "kv_a_proj_with_mqa.weight", (rank + self.rotary_dim, self.hidden), "kv_down", layer)
        yield Tensor(at + "kv_a_layernorm.weight", (rank,), "kv_down_norm", layer)
        up = self.heads * (self.plain_dim + self.value_dim)
        yield Tensor(at + "kv_b_proj.weight", (up, rank), "kv_up", layer)
        yield Tensor(at + "o_proj.weight", (self.hidden, self.heads * self.value_dim), "o", layer)

    # --- Megatron -----------------------------------------------------------------------------------------------------

    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "multi_latent_attention": True,
            "num_attention_heads": self.heads,
            "num_query_groups": self.heads,
            "kv_channels": self.head_dim,
            "add_qkv_bias": False,
            "qk_layernorm": True,  # of the latents
            "q_lora_rank": self.query_rank,
            "kv_lora_rank": self.key_value_rank,
            "qk_head_dim": self.plain_dim,
            "qk_pos_emb_head_dim": self.rotary_dim,
            "v_head_dim": self.value_dim,
        }
        if (yarn := self.rope.yarn) is not None:
            fields |= {
                "rope_type": "yarn",
                "rotary_scaling_factor": yarn.factor,
                "original_max_position_embeddings": yarn.original_max_positions,
                **{name: getattr(yarn, name) for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")},
            }
        return fields

    def on_megatron(self, rank: LayerOnRank, of: LayerTensors) -> None:
        roles, at = of.roles, "self_attention."
        down = rank.whole if rank.fused else rank.rows
        norms = ("linear_q_up_proj.layer_norm_weight", "linear_kv_up_proj.layer_norm_weight")
        query_norm, norm = norms if rank.fused else ("q_layernorm.weight", "kv_layernorm.weight")
        if self.query_rank is None:
            rank.rows(at + "linear_q_proj.weight", roles["q"])
        else:
            down(at + "linear_q_down_proj.weight", roles["q_down"])
            rank.whole(at + query_norm, roles["q_down_norm"])
            rank.rows(at + "linear_q_up_proj.weight", roles["q_up"])
        down(at + "linear_kv_down_proj.weight", roles["kv_down"])
        rank.whole(at + norm, roles["kv_down_norm"])
        rank.rows(at + "linear_kv_up_proj.weight", roles["kv_up"])
        rank.columns(at + "linear_proj.weight", roles["o"])

    def divided(self) -> list[Divided]:
        return [Divided("tensor", "attention heads (num_attention_heads)", self.heads)]

    def unmet(self, tensor: int, fused: bool) -> Iterator[Unmet]:
        rows = {"kv_lora_rank + qk_rope_head_dim": self.key_value_rank + self.rotary_dim}
        rows["q_lora_rank"] = self.query_rank or 0
        for name, size in rows.items():
            if size % tensor and not fused:
                yield Unmet(f"{name}: {size}", f"a multiple of {tensor}")

    # --- SGLang -------------------------------------------------------------------------------------------------------

    def on_engine(self, rank: LayerOnEngine, of: LayerTensors) -> None:
        """Adds the projections down whole, fused if queries have one, and the projections up, cut by heads."""
        roles = of.roles
        if "q_down" in roles:
            down = [all_rows(roles[role]) for role in ("q_down", "kv_down")]
            rank.rows(down, ("q_a_proj", "fused_qkv_a_proj_with_mqa"))
        else:
            rank.whole(roles["kv_down"])
        for tensor in (roles.get("q_up") or roles["q"], roles["kv_up"]):
            rank.rows([rank.shard(tensor)])
        rank.columns(roles["o"])

    def unmet_on_engine(self, sizes: EngineSizes, device: str) -> Iterator[Unmet]:
        ranks = sizes.tensor if device == "cpu" else sizes.tensor // sizes.attention_data
        if self.heads % ranks:
            yield Unmet(f"attention heads: {self.heads}", f"a multiple of {ranks}")

    # --- costs --------------------------------------------------------------------------------------------------------

    def work(self) -> LayerWork:
        up = self.key_value_rank * self.heads * (self.plain_dim + self.value_dim)
        up += (self.query_rank or self.hidden) * self.heads * self.head_dim
        down = self.hidden * (self.key_value_rank + self.rotary_dim + (self.query_rank or 0))
        return LayerWork(
            projections=2.0 * (down + up + self.heads * self.value_dim * self.hidden),
            pairs=float(self.heads * (self.head_dim + self.value_dim)),
            decoded_pairs=2.0 * self.heads * (2 * self.key_value_rank + self.rotary_dim),
            up=2.0 * up,
        )

    def cached_elements(self, tensor: int) -> int:
        """Returns the elements of a token's latents, which every rank of an engine holds whole."""
        return self.key_value_rank + self.rotary_dim

    def state_bytes(self, tensor: int, element_bytes: int) -> int:
        return 0

    def derived_elements(self, ranks: int) -> int:
        """Returns the elements of w_kc and w_vc, which SGLang makes of kv_b_proj."""
        return self.heads // ranks * (self.plain_dim + self.value_dim) * self.key_value_rank

    def engine_columns(self, sizes: EngineSizes) -> float:
        return 4 * self.heads / sizes.tensor * self.head_dim

    def core(self, context: int, longest: int) -> tuple[str, str | None]:
        return "latent attention", None

    def exchanged(self, tensor: int) -> tuple[float, float]:
        columns = self.heads / tensor * (self.head_dim + self.value_dim)
        return columns, columns

    def kept_bytes(self, its: Pass) -> int:
        """Returns the bytes of down projections with their norms, then queries, keys, values and output by head."""
        element, heads = its.element_bytes, self.heads / its.layout.tensor
        held = float(its.norm_bytes(self.key_value_rank))
        held += 5 * its.tokens_of_rank * self.rotary_dim * element
        if self.query_rank is not None:
            held += its.norm_bytes(self.query_rank)
        # Queries, keys and values; the local layers' core keeps others, which are made of them.
        kept = not its.transformer_engine or "mla_up_proj" not in its.modules
        held += its.tokens * heads * (kept * (2 * self.head_dim + self.value_dim) + self.value_dim) * element
        if "core_attn" not in its.modules:
            held += 4 * its.tokens * heads if its.transformer_engine else self.score_bytes(its)
        return int(held)

    def score_bytes(self, its: Pass) -> int:
        """Returns the bytes of float32 scores of all heads here, of every token with its sequence; 0 if none are kept.

        PackedLatentAttention has heads of unequal size for values: torch then keeps the scores of whole sequences.
        """
        if its.transformer_engine:
            return 0
        return int(4 * its.tokens * self.heads / its.layout.tensor * its.longest)

    def forward_bytes(self, its: Pass) -> int:
        return 5 * self.score_bytes(its) // 2
