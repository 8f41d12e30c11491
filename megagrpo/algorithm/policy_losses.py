"""The policy's loss, per token: PPO's clipped objective and its relatives, each with its settings. The objective: its
sum with KL penalty and entropy bonus, by global weights.

Below, r = exp(logprob - old logprob) is a token's ratio, A its advantage, sg(x) is x without a gradient.

To add a loss: its class here, and its name in PolicyLossConfig. The recipe imports this file, so torch is imported only
where a loss is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from megagrpo.algorithm.kl import KLConfig, binary_kl, bounded, kl_estimate
from megagrpo.errors import Problem, RecipeError
from megagrpo.section import (
    FILE_AND_FUNCTION,
    ByName,
    Fraction,
    NonNegativeFloat,
    Number,
    PositiveFloat,
    Rules,
    Section,
)
from megagrpo.user_functions import UserFunction

if TYPE_CHECKING:
    from torch import Tensor

    from megagrpo.algorithm.over_ranks import Sequences


@dataclass(frozen=True)
class PolicyInputs:
    """The response tokens of one microbatch, each field [tokens]."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    sequences: Sequences
    chosen: Tensor | None = None  # bool, by CovarianceLoss.choose

    def log_ratio(self) -> Tensor:
        """Returns log r, bounded."""
        return bounded(self.logprobs - self.old_logprobs)


@dataclass(frozen=True)
class PolicyLoss:
    """The loss and its clipping by token, each [tokens]. Only `loss` carries a gradient."""

    loss: Tensor
    ratio: Tensor  # of the token, whatever ratio the loss is made of
    clipped_low: Tensor  # bool: the lower bound cut this token's gradient, or for cispo changed its weight
    clipped_high: Tensor  # bool: the upper bound or the dual clip did


class PolicyLossMethod(Section):
    """One loss."""

    name: str

    chooses_tokens: ClassVar[bool] = False
    """True if the tokens of a whole minibatch are chosen by their old logprobs, before its first gradient."""

    has_ratio: ClassVar[bool] = True
    """True if the loss reads the old logprobs."""

    def of_tokens(self, inputs: PolicyInputs) -> PolicyLoss:
        """Computes the loss of each token. Raises ValueError if the loss needs chosen tokens and has none."""
        raise NotImplementedError


class ClippedLoss(PolicyLossMethod):
    """A loss with bounds on ratios."""

    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Ratios are clipped at 1 - clip_low."""

    clip_high: NonNegativeFloat = 0.2
    """Ratios are clipped at 1 + clip_high."""

    def clipped(self, ratio: Tensor, inputs: PolicyInputs, dual_clip: float | None) -> PolicyLoss:
        """Computes PPO's clipped objective for a ratio of the token or of its response."""
        low, high, advantages = 1 - self.clip_low, 1 + self.clip_high, inputs.advantages
        loss = -(ratio * advantages).minimum(ratio.clamp(low, high) * advantages)
        clipped_high = (advantages > 0) & (ratio.detach() > high)
        if dual_clip is not None:
            beyond = (advantages < 0) & (ratio.detach() > dual_clip)
            loss = (-dual_clip * advantages).where(beyond, loss)
            clipped_high |= beyond
        return PolicyLoss(
            loss=loss,
            ratio=inputs.log_ratio().exp().detach(),
            clipped_low=(advantages < 0) & (ratio.detach() < low),
            clipped_high=clipped_high,
        )


class PpoClipConfig(ClippedLoss):
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); with dual_clip, where A < 0, at most dual_clip |A|.

    PPO, arXiv:1707.06347, eq. 7; bounds apart: DAPO, arXiv:2503.14476, eq. 10; dual clip: arXiv:1912.09729.
    """

    name: Literal["ppo_clip"] = "ppo_clip"

    dual_clip: Annotated[float, Field(gt=1, le=1e9)] | None = None
    """With a negative advantage A the loss is at most dual_clip x |A|. null: no bound."""

    def of_tokens(self, inputs: PolicyInputs) -> PolicyLoss:
        return self.clipped(inputs.log_ratio().exp(), inputs, self.dual_clip)


class GspoConfig(ClippedLoss):
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) with s = exp(mean of log r over the response).

    GSPO, arXiv:2507.18071, eq. 5 to 7, as its token variant, eq. 13 and 14: s is sg(s) r / sg(r) at each token. Under
    weights that are equal within a response this has the value and the gradient of the loss by response, and the
    recipe's aggregation and any token's own advantage or weight still mean something. The mean is over all tokens of
    the response, also those that a correction leaves out of the loss.
    """

    name: Literal["gspo"] = "gspo"

    def of_tokens(self, inputs: PolicyInputs) -> PolicyLoss:
        mean = inputs.sequences.mean(inputs.logprobs - inputs.old_logprobs)
        of_token = bounded(inputs.sequences.of_tokens(mean)).to(inputs.logprobs.dtype)
        return self.clipped((of_token + _gradient_of(inputs.logprobs)).exp(), inputs, None)


class CispoConfig(ClippedLoss):
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprob: clipped tokens keep a gradient.

    CISPO, arXiv:2506.13585, eq. 4 and 5. (Its authors use no lower bound: clip_low 1.)
    """

    name: Literal["cispo"] = "cispo"

    def of_tokens(self, inputs: PolicyInputs) -> PolicyLoss:
        ratio = inputs.log_ratio().exp().detach()
        low, high = 1 - self.clip_low, 1 + self.clip_high
        loss = -ratio.clamp(low, high) * inputs.advantages * inputs.logprobs
        return PolicyLoss(loss, ratio, clipped_low=ratio < low, clipped_high=ratio > high)


class GmpoConfig(PolicyLossMethod):
    """-g A with g the geometric mean over the response of min(r, e^clip_high) if A > 0, else max(r, e^-clip_low).

    GMPO, arXiv:2507.20673: bounds are on log r, token by token. As in gspo each token carries its own part of
    the gradient, so that a token without a weight gets none.
    """

    name: Literal["gmpo"] = "gmpo"

    clip_low: NonNegativeFloat = 0.2
    """Ratios are clipped at exp(-clip_low), by token."""

    clip_high: NonNegativeFloat = 0.2
    """Ratios are clipped at exp(clip_high), by token."""

    def of_tokens(self, inputs: PolicyInputs) -> PolicyLoss:
        log_ratio = inputs.log_ratio().detach()
        clipped_low = (inputs.advantages < 0) & (log_ratio < -self.clip_low)
        clipped_high = (inputs.advantages > 0) & (log_ratio > self.clip_high)
        clipped = log_ratio.masked_fill(clipped_low, -self.clip_low).masked_fill(clipped_high, self.clip_high)
        mean = inputs.sequences.of_tokens(inputs.sequences.mean(clipped)).to(log_ratio.dtype)
        of_token = _gradient_of(inputs.logprobs).masked_fill(clipped_low | clipped_high, 0.0)
        return PolicyLoss(-(mean + of_token).exp() * inputs.advantages, log_ratio.exp(), clipped_low, clipped_high)


class SapoConfig(PolicyLossMethod):
    """-4 / t sigmoid(t (r - 1)) A with t = temperature_positive if A > 0, else temperature_negative.

    SAPO, arXiv:2511.20347: the gradient fades as r leaves 1, and is that of r A at 1.
    """

    name: Literal["sapo"] = "sapo"

    temperature_positive: PositiveFloat = 1.0
    """Steepness of the gate where the advantage is positive."""

    temperature_negative: PositiveFloat = 1.05
    """Steepness of the gate where it is not."""

    def of_tokens(self, inputs: PolicyInputs) -> PolicyLoss:
        ratio = inputs.log_ratio().exp()
        positive, negative = ratio.new_tensor(self.temperature_positive), ratio.new_tensor(self.temperature_negative)
        temperature = positive.where(inputs.advantages > 0, negative)
        gate = 4 / temperature * (temperature * (ratio - 1)).sigmoid()
        return unclipped(-gate * inputs.advantages, ratio)


class DivergenceLoss(PolicyLossMethod):
    """-r A without tokens that have left a trust region: DPPO, arXiv:2602.04879, in its binary approximation.

    A token leaves it when its divergence is above the bound and a step along the gradient would raise it further: its
    probability has risen and A > 0, or has fallen and A < 0. Such tokens get no gradient, but still count in the
    denominators. Old logprobs are those of the policy that the region is around. The authors put it around the policy
    that sampled, as the engine computed it: rollout_logprobs_as_old: true. Their top-k approximation is not here: it
    needs the engine's other probabilities of each token.
    """

    clip_low: float
    clip_high: float

    def divergence(self, logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
        """Computes the divergence of each token, float64 [tokens]."""
        raise NotImplementedError

    def of_tokens(self, inputs: PolicyInputs) -> PolicyLoss:
        logprobs, old, advantages = inputs.logprobs.detach(), inputs.old_logprobs, inputs.advantages
        divergence, ratio = self.divergence(logprobs, old), inputs.log_ratio().exp()
        left_low = (advantages < 0) & (logprobs < old) & (divergence > self.clip_low)
        left_high = (advantages > 0) & (logprobs > old) & (divergence > self.clip_high)
        loss = (-ratio * advantages).masked_fill(left_low | left_high, 0.0)
        return PolicyLoss(loss, ratio.detach(), left_low, left_high)


class DppoTvConfig(DivergenceLoss):
    """-r A, and 0 where A > 0 and p - q > clip_high, or A < 0 and q - p > clip_low.

    DPPO-Binary-TV, arXiv:2602.04879. p is the token's probability, q the old one; |p - q| is the total variation.
    """

    name: Literal["dppo_tv"] = "dppo_tv"

    clip_low: Fraction = 0.15
    """Largest fall of a token's probability where the advantage is negative. 1: no bound."""

    clip_high: Fraction = 0.15
    """Largest rise of a token's probability where the advantage is positive. 1: no bound."""

    def divergence(self, logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
        return (logprobs.double().exp() - old_logprobs.double().exp()).abs()


class DppoKlConfig(DivergenceLoss):
    """-r A, and 0 where A > 0, p > q and D > clip_high; where A < 0, p < q and D > clip_low.

    DPPO-Binary-KL, arXiv:2602.04879. p is the token's probability, q the old one;
    D = q log(q / p) + (1 - q) log((1 - q) / (1 - p)), the KL divergence of the old policy from the policy.
    """

    name: Literal["dppo_kl"] = "dppo_kl"

    clip_low: PositiveFloat = 0.05
    """Largest D of a token whose probability falls where the advantage is negative."""

    clip_high: PositiveFloat = 0.05
    """Largest D of a token whose probability rises where the advantage is positive."""

    def divergence(self, logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
        return binary_kl(old_logprobs, logprobs)


class CovarianceLoss(PolicyLossMethod):
    """A loss that treats the tokens with the largest covariances of logprob and advantage apart: these make the entropy
    fall (arXiv:2505.22617, section 4).
    """

    chooses_tokens: ClassVar[bool] = True

    covariance_share: Fraction = 2e-4
    """Share of a minibatch's tokens that are chosen, at least one token."""

    def choose(
        self,
        old_logprobs: Tensor,
        advantages: Tensor,
        kept: Tensor,
        draws: Tensor,
        sum_over_ranks: Callable[[Tensor], None],
    ) -> Tensor:
        """Selects the tokens of this rank's part of a minibatch that the loss treats apart: bool [tokens].

        A token's covariance is (logprob - mean logprob) x (advantage - mean advantage), means over the minibatch's kept
        tokens on all ranks. clip_cov chooses at random among those in [covariance_low, covariance_high], kl_cov the
        largest: covariance_share of the kept tokens, at least one. Logprobs are the old ones, so that the choice is
        made once, before any gradient: with those of the moment it would need all microbatches' forward passes first,
        or depend on how they are cut.

        old_logprobs, advantages: float [tokens]; kept: bool [tokens]; draws: float64 [tokens] in [0, 1), each token's
        own whatever the layout; sum_over_ranks sums a tensor in place.
        """
        import torch

        from megagrpo.algorithm.over_ranks import largest_of_ranks

        logprobs, advantages = old_logprobs.double(), advantages.double()
        sums = torch.stack([torch.ones_like(logprobs), logprobs, advantages])[:, kept].sum(1)
        sum_over_ranks(sums)
        tokens = round(sums[0].item())
        logprob_mean, advantage_mean = (sums[1:] / max(tokens, 1)).tolist()
        covariance = ((logprobs - logprob_mean) * (advantages - advantage_mean)).float()
        candidates, values = self._candidates(kept, covariance)
        count = candidates.sum()
        sum_over_ranks(count)
        wanted = min(max(int(self.covariance_share * tokens), 1), int(count))
        chosen = torch.zeros_like(kept)
        if wanted:
            chosen[candidates] = largest_of_ranks(values[candidates], draws[candidates], wanted, sum_over_ranks)
        return chosen

    def _candidates(self, kept: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the tokens among which the loss chooses, bool [tokens], and the values by which, float [tokens]."""
        return kept, covariance


class ClipCovConfig(CovarianceLoss, ClippedLoss):
    """ppo_clip without the chosen tokens, which still count in the denominators. Clip-Cov, arXiv:2505.22617."""

    name: Literal["clip_cov"] = "clip_cov"

    dual_clip: Annotated[float, Field(gt=1, le=1e9)] | None = None
    """With a negative advantage A the loss is at most dual_clip x |A|. null: no bound."""

    covariance_low: Number = 1.0
    """Covariances from here on may be chosen."""

    covariance_high: Number = 5.0
    """Up to here."""

    def of_tokens(self, inputs: PolicyInputs) -> PolicyLoss:
        clipped = self.clipped(inputs.log_ratio().exp(), inputs, self.dual_clip)
        loss = clipped.loss.masked_fill(_chosen(inputs), 0.0)
        return PolicyLoss(loss, clipped.ratio, clipped.clipped_low, clipped.clipped_high)

    def _candidates(self, kept: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        within = kept & (covariance >= self.covariance_low) & (covariance <= self.covariance_high)
        return within, covariance.new_zeros(covariance.shape)  # draws alone decide

    RULES: ClassVar[Rules[ClipCovConfig]] = {
        "covariance_bounds": lambda loss: loss.covariance_low >= loss.covariance_high
    }


class KlCovConfig(CovarianceLoss):
    """-r A, and on the chosen tokens + covariance_kl |log r|. Nothing is clipped. KL-Cov, arXiv:2505.22617.

    The penalty has no gradient before the policy has moved: it needs more than one optimizer step for each batch.
    """

    name: Literal["kl_cov"] = "kl_cov"

    covariance_kl: PositiveFloat = 1.0
    """Weight of the penalty |log ratio| on the chosen tokens."""

    def of_tokens(self, inputs: PolicyInputs) -> PolicyLoss:
        log_ratio = inputs.log_ratio()
        ratio = log_ratio.exp()
        penalty = (self.covariance_kl * log_ratio.abs()).masked_fill(~_chosen(inputs), 0.0)
        return unclipped(penalty - ratio * inputs.advantages, ratio)


class ReinforceConfig(PolicyLossMethod):
    """-A logprob: no ratio at all. REINFORCE (Williams, 1992); GPG, arXiv:2504.02546."""

    has_ratio: ClassVar[bool] = False

    name: Literal["reinforce"] = "reinforce"

    def of_tokens(self, inputs: PolicyInputs) -> PolicyLoss:
        return unclipped(-inputs.advantages * inputs.logprobs, inputs.log_ratio().exp())


class OwnLossConfig(PolicyLossMethod):
    """A function of your own: (inputs: PolicyInputs, **arguments) -> PolicyLoss, or the loss of each token alone. See
    docs/algorithms.md.
    """

    name: Annotated[str, Field(pattern=FILE_AND_FUNCTION)]
    """FILE.py:FUNCTION."""

    arguments: dict[str, Any] = {}
    """Keyword arguments of the function."""

    def function(self) -> UserFunction:
        return UserFunction("algorithm.loss.name", self.name, self.arguments)

    def of_tokens(self, inputs: PolicyInputs) -> PolicyLoss:
        """Calls the function. Raises RecipeError if it does not load, fails, or does not give one number per token."""
        from torch import Tensor

        result = self.function()(inputs)
        if isinstance(result, Tensor):
            result = unclipped(result, inputs.log_ratio().exp())
        parts = vars(result) if isinstance(result, PolicyLoss) else {"result": result}
        tokens = inputs.logprobs.shape
        for part, values in parts.items():
            if not isinstance(values, Tensor) or values.shape != tokens or values.device != inputs.logprobs.device:
                shape = f"{values.dtype} {list(values.shape)} on {values.device}" if isinstance(values, Tensor) else ""
                given = f"{self.name} returned {shape or type(values).__name__} as its {part}"
                numbers = f"a number for each of the {tokens.numel()} tokens, on {inputs.logprobs.device}"
                needed = f"{numbers}: a tensor, or a PolicyLoss of tensors"
                fix = "return a tensor like inputs.logprobs"
                raise RecipeError(Problem("algorithm.loss.name", given, needed, fix))
        return result


PolicyLossConfig = Annotated[
    PpoClipConfig
    | GspoConfig
    | CispoConfig
    | GmpoConfig
    | SapoConfig
    | DppoTvConfig
    | DppoKlConfig
    | ClipCovConfig
    | KlCovConfig
    | ReinforceConfig
    | OwnLossConfig,
    ByName(default="ppo_clip"),
]


def unclipped(loss: Tensor, ratio: Tensor) -> PolicyLoss:
    """Returns the result of a loss without bounds. loss, ratio: [tokens]."""
    nothing = ratio.new_zeros(ratio.shape).bool()
    return PolicyLoss(loss, ratio.detach(), clipped_low=nothing, clipped_high=nothing)


def _gradient_of(logprobs: Tensor) -> Tensor:
    """Returns 0, with the gradient of `logprobs`."""
    return logprobs - logprobs.detach()


def _chosen(inputs: PolicyInputs) -> Tensor:
    if inputs.chosen is None:
        raise ValueError("a loss by covariance without chosen tokens")
    return inputs.chosen


# --- the whole objective ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ObjectiveInputs(PolicyInputs):
    """The inputs of the policy loss and of the other terms, each [tokens]. `weights` come from aggregation.py."""

    weights: Tensor
    entropy: Tensor | None  # None: no entropy bonus, not reported
    reference_logprobs: Tensor | None  # None: no KL term, no estimate
    importance: Tensor | None = None  # of the policy's loss, from correction.py; None: 1
    divergence: Tensor | None = None  # from teachers
    given: Tensor | None = None  # bool: tokens with no other term than the divergence; None: all were sampled


@dataclass(frozen=True)
class Objective:
    """The value of the objective. `loss`, a scalar, is minimised; the rest, [tokens], only explains it."""

    loss: Tensor
    policy: PolicyLoss
    policy_term: Tensor  # the policy's part of `loss`
    kl: Tensor | None


def grpo_objective(
    inputs: ObjectiveInputs,
    method: PolicyLossMethod,
    kl_settings: KLConfig,
    *,
    kl_coefficient: float,
    entropy_coefficient: float,
    divergence_coefficient: float = 0.0,
) -> Objective:
    """Sums weight x (importance x policy loss + kl_coefficient x KL - entropy_coefficient x entropy +
    divergence_coefficient x divergence) over tokens; of given tokens the divergence alone.

    kl_coefficient: this step's, of the loss term; 0 when the penalty is in the reward. GRPO, arXiv:2402.03300, eq. 3,
    negated. KL is estimated, to be reported, whenever reference logprobs are there. Raises ValueError if kl_coefficient
    needs them and they are not, or an entropy bonus has no entropies.
    """
    if kl_coefficient and inputs.reference_logprobs is None:
        raise ValueError("a KL term without reference logprobs")
    used, old = inputs.weights != 0, inputs.old_logprobs
    sampled = used if inputs.given is None else used & ~inputs.given
    # NaN in a token that a correction left out, times a weight of 0, would still be NaN: in the loss and its gradient.
    inputs = replace(inputs, old_logprobs=old.where(sampled | old.isfinite(), inputs.logprobs.detach()))
    policy = method.of_tokens(inputs)
    per_token = policy.loss if inputs.importance is None else inputs.importance * policy.loss
    policy_term = (inputs.weights * per_token.detach()).where(sampled, 0.0)
    reference, kl = inputs.reference_logprobs, None
    if reference is not None:
        kl = kl_estimate(inputs.logprobs, reference, kl_settings.estimator, kl_settings.straight_through)
        if kl_coefficient:
            per_token = per_token + kl_coefficient * kl
    if entropy_coefficient:
        if inputs.entropy is None:
            raise ValueError("an entropy bonus without entropies")
        per_token = per_token - entropy_coefficient * inputs.entropy
    divergence = 0.0 if inputs.divergence is None else divergence_coefficient * inputs.divergence
    loss = (inputs.weights * (per_token.where(sampled, 0.0) + divergence)).where(used, 0.0).sum()
    return Objective(loss, policy, policy_term, None if kl is None else kl.detach())
