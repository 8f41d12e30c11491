"""Mixtures of experts: a router, routed experts, and shared experts that every token passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megagrpo.weights.families.parts.mlp import Mlp
from megagrpo.weights.families.parts.part import Divided, LayerTensors, LayerWork, Pass, Tensor, Unmet

if TYPE_CHECKING:
    from megagrpo.weights.sides.megatron_rank import LayerOnRank
    from megagrpo.weights.sides.sglang import EngineSizes, LayerOnEngine

CLAMPED_ALPHA = 1.702
"""The factor inside the sigmoid of gpt-oss' activation."""
ROUTER_BYTES = 10
"""For each token and expert on a training rank: float32 scores and probabilities, and two maps of bool."""
DISPATCH_BYTES = 24
"""For each token that goes to an expert: indices (int64) there and back, and its probability in float32."""


@dataclass(frozen=True)
class SigmoidRouter:
    """Routing as in DeepSeek-V3 (arXiv:2412.19437): sigmoid scores, and a bias that only the choice of experts sees.

    A token chooses among the experts of its best `groups_per_token` of `groups` groups. `scale` multiplies the weights.
    """

    groups: int
    groups_per_token: int
    scale: float


@dataclass(frozen=True)
class SoftmaxRouter:
    """Routing as in ERNIE 4.5: softmax scores, normalised, and a bias that only the choice of experts sees."""


@dataclass(frozen=True)
class Experts:
    """`experts` gated MLPs of `ffn` columns, of which a token passes `per_token`. `router` is None for softmax scores
    without a bias.

    `shared_ffn` is the total size of the experts that every token passes.
    """

    hidden: int
    experts: int
    per_token: int
    ffn: int
    normalize_top_k: bool
    router: SigmoidRouter | SoftmaxRouter | None = None
    shared_ffn: int = 0
    shared_weight: bool = False
    """The shared experts' output is multiplied by the sigmoid of a projection to one number."""
    bias: bool = False
    """Biases of the router and of all projections."""
    clamp: float | None = None
    """The activation of gpt-oss: gate x sigmoid(1.702 gate) x (up + 1), of values clamped to this. None: SiLU."""

    recomputed_as = "moe"
    holds_norm = None

    @property
    def activation(self) -> str:
        return "silu" if self.clamp is None else "quick_gelu"

    @property
    def only_local(self) -> str | None:
        if isinstance(self.router, SoftmaxRouter):
            return "softmax routers with a bias"
        return "experts with biases" if self.bias else "clamped experts" if self.clamp is not None else None

    @property
    def gathers(self) -> bool:
        return self.shared_ffn > 0

    @property
    def recomputes(self) -> frozenset[str]:
        return frozenset(["moe", "moe_act", *(["shared_experts"] if self.shared_ffn else [])])

    def tensors(self, prefix: str, layer: int) -> Iterator[Tensor]:
        at, up, down = prefix + "mlp.", (self.ffn, self.hidden), (self.hidden, self.ffn)
        matrices = {"gate": up, "up": up, "down": down}
        yield Tensor(at + "gate.weight", (self.experts, self.hidden), "router", layer)
        if self.bias:
            yield Tensor(at + "gate.bias", (self.experts,), "router_linear_bias", layer)
        if self.router is not None:
            yield Tensor(at + "gate.e_score_correction_bias", (self.experts,), "router_bias", layer)
        for expert in range(self.experts):
            of_expert = f"{at}experts.{expert}."
            for name, shape in matrices.items():
                yield Tensor(f"{of_expert}{name}_proj.weight", shape, f"expert_{name}", layer, expert)
            for name, (rows, _) in matrices.items() if self.bias else ():
                yield Tensor(f"{of_expert}{name}_proj.bias", (rows,), f"expert_{name}_bias", layer, expert)
        if ffn := self.shared_ffn:
            yield Tensor(at + "shared_experts.gate_proj.weight", (ffn, self.hidden), "shared_gate", layer)
            yield Tensor(at + "shared_experts.up_proj.weight", (ffn, self.hidden), "shared_up", layer)
            yield Tensor(at + "shared_experts.down_proj.weight", (self.hidden, ffn), "shared_down", layer)
        if self.shared_weight:
            yield Tensor(at + "shared_expert_gate.weight", (1, self.hidden), "shared_weight", layer)

    def with_experts(self, experts: int) -> Experts:
        return replace(self, experts=experts)

    # --- Megatron -----------------------------------------------------------------------------------------------------

    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "gated_linear_unit": True,
            "num_moe_experts": self.experts,
            "moe_router_topk": self.per_token,
            "moe_ffn_hidden_size": self.ffn,
            # Softmax over the chosen experts is softmax over all of them, normalised over the chosen.
            "moe_router_pre_softmax": not self.normalize_top_k,
            **({"moe_shared_expert_intermediate_size": self.shared_ffn} if self.shared_ffn else {}),
            **({"moe_shared_expert_gate": True} if self.shared_weight else {}),
            **({"add_bias_linear": True} if self.bias else {}),
        }
        if self.clamp is not None:
            fields |= {"activation_func_clamp_value": self.clamp, "glu_linear_offset": 1.0}
        if (router := self.router) is not None:  # Megatron has a bias only beside sigmoid scores
            fields |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
        if isinstance(router, SigmoidRouter):
            fields["moe_router_topk_scaling_factor"] = router.scale
            if router.groups > router.groups_per_token:
                fields |= {"moe_router_num_groups": router.groups, "moe_router_group_topk": router.groups_per_token}
        return fields

    def on_megatron(self, rank: LayerOnRank, of: LayerTensors) -> None:
        roles = of.roles
        rank.whole("mlp.router.weight", roles["router"])
        if self.router is not None:
            rank.whole("mlp.router.expert_bias", roles["router_bias"])
        if self.bias:
            rank.whole("mlp.router.bias", roles["router_linear_bias"])
        if self.shared_ffn:
            rank.rows("mlp.shared_experts.linear_fc1.weight", roles["shared_gate"], roles["shared_up"])
            rank.columns("mlp.shared_experts.linear_fc2.weight", roles["shared_down"])
        if self.shared_weight:
            rank.whole("mlp.shared_experts.gate_weight", roles["shared_weight"])
        rank.experts(of.experts, bias=self.bias)

    def divided(self) -> list[Divided]:
        return [
            Divided("expert", "experts in a layer", self.experts),
            Divided("expert_tensor", "columns in each expert (moe_intermediate_size)", self.ffn),
            Divided("tensor", "columns of the shared experts", self.shared_ffn),
        ]

    # --- SGLang -------------------------------------------------------------------------------------------------------

    def on_engine(self, rank: LayerOnEngine, of: LayerTensors) -> None:
        """Adds the whole router, the experts of this rank, and its part of the shared experts."""
        roles = of.roles
        rank.whole(roles["router"], wide=rank.of_class.wide_router)
        if self.bias:
            rank.whole(roles["router_linear_bias"])
        if self.router is not None:
            rank.whole(roles["router_bias"])
        rank.experts(roles["router"], of.experts, self.ffn, bias=self.bias)
        if self.shared_ffn:
            # SGLang pads the size of one shared expert, and multiplies it by their number.
            count = 1 if self.shared_weight else self.shared_ffn // self.ffn
            padded = rank.padded(self.shared_ffn // count) * count
            rank.mlp([roles["shared_gate"], roles["shared_up"]], roles["shared_down"], padded)
        if self.shared_weight:
            rank.whole(roles["shared_weight"])

    def unmet_on_engine(self, sizes: EngineSizes, device: str) -> Iterator[Unmet]:
        shared = 0 if device == "cpu" else self.shared_ffn  # on CPUs SGLang pads it
        rules = {
            "experts": (self.experts, sizes.expert),
            "expert ffn": (self.ffn, sizes.tensor // sizes.expert),
            "shared experts' ffn": (shared, sizes.tensor),
        }
        for what, (size, ranks) in rules.items():
            if size % ranks:
                yield Unmet(f"{what}: {size}", f"a multiple of {ranks}")

    # --- costs --------------------------------------------------------------------------------------------------------

    def work(self) -> LayerWork:
        shared = 6.0 * self.hidden * self.shared_ffn
        return LayerWork(
            mlp=shared + 2.0 * self.hidden * self.experts,
            experts=6.0 * self.hidden * self.per_token * self.ffn,
            shared=shared,
        )

    def engine_columns(self, sizes: EngineSizes) -> float:
        """Returns the elements of a token's copies, and those that its experts make of them on one rank."""
        return self.per_token * (self.hidden + 3 * self.ffn / (sizes.tensor / sizes.expert))

    def tokens(self, its: Pass) -> int:
        """Returns the tokens that pass one rank's experts. Ranks that share an expert's matrices pool their tokens."""
        return int(its.tokens_of_rank * self.per_token * its.layout.expert_tensor * its.expert_imbalance)

    def kept_bytes(self, its: Pass) -> int:
        """Returns the bytes of router and dispatch for this rank's tokens, of experts here, and of shared experts."""
        held = its.tokens_of_rank * (self.experts * ROUTER_BYTES + self.per_token * DISPATCH_BYTES)
        tensors = (3 if its.device != "cpu" else 6) if self.clamp is None else 8
        tensors -= "moe_act" in its.modules
        columns = self.hidden + tensors * self.ffn // its.layout.expert_tensor
        shared = 0 if "shared_experts" in its.modules else Mlp(self.hidden, self.shared_ffn).kept_bytes(its)
        shared += its.hidden_bytes * self.shared_weight  # the output before it is weighted
        return held + self.tokens(its) * columns * its.element_bytes + shared

    def widest(self, its: Pass) -> tuple[int, int]:
        return self.tokens(its), self.ffn // its.layout.expert_tensor

    def forward_bytes(self, its: Pass) -> int:
        """Returns the bytes of tokens on their way to the experts and back, in the order of either side."""
        gathered = its.gathered_bytes if its.layout.tensor > 1 else 0
        return gathered + 4 * self.tokens(its) * self.hidden * its.element_bytes
