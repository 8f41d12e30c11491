"""algorithm: from scores to advantages, and the loss. The methods are in megagrpo/algorithm/."""

from __future__ import annotations

from typing import ClassVar, Literal

from megagrpo.algorithm.advantages import AdvantageConfig, GrpoConfig
from megagrpo.algorithm.aggregation import AggregationConfig, TokenMeanConfig
from megagrpo.algorithm.correction import CorrectionConfig
from megagrpo.algorithm.credit import CreditConfig, OutcomeConfig
from megagrpo.algorithm.critic import CriticConfig
from megagrpo.algorithm.distillation import DistillationConfig
from megagrpo.algorithm.kl import KLConfig, ReferenceConfig
from megagrpo.algorithm.policy_losses import DivergenceLoss, PolicyLossConfig, PpoClipConfig
from megagrpo.algorithm.token_advantages import ReinforcePlusPlusConfig
from megagrpo.section import NonNegativeFloat, PositiveInt, Rules, Section


class AlgorithmConfig(Section):
    """The objective."""

    advantage: AdvantageConfig = GrpoConfig()
    """Method that makes advantages from scores. docs/algorithms.md says when to use which."""

    credit: CreditConfig = OutcomeConfig()
    """Turns of an agent's rollout that get its rewards. outcome: all tokens get the rollout's advantage. discounted:
    every turn its discounted rewards to come, compared with those of all turns of the group; turn_groups: with those of
    the same turn."""

    loss: PolicyLossConfig = PpoClipConfig()
    """The policy's loss, per token. docs/algorithms.md says when to use which."""

    kl: KLConfig = KLConfig()
    """Penalty against the reference policy."""

    reference: ReferenceConfig = ReferenceConfig()
    """Updates of the reference policy, if any."""

    critic: CriticConfig | None = None
    """For advantage: gae only."""

    distillation: DistillationConfig | None = None
    """Learning from teachers. null: `teachers` must be empty."""

    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""

    entropy_metric: bool = True
    """Report the policy's entropy. false: it is computed for an entropy bonus only."""

    aggregation: AggregationConfig = TokenMeanConfig()
    """Reduction of per-token losses to one number. token_mean: mean over the minibatch's tokens. seq_mean_...: mean
    over responses of each one's sum, mean, or sum / divisor (Dr.GRPO). token_sum: sum over the minibatch's tokens."""

    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction between engines and trainer."""

    routing: Literal["auto", "replay", "own"] = "auto"
    """Experts of a mixture that trained tokens pass. replay: those that the engine chose for each token (R3,
    arXiv:2510.11370), with the trainer's own weights; a response without routes is left out. own: those that the
    trainer's routers choose. auto: replay where the engine can (SGLang with pipeline stages cannot); a response
    without routes is routed by itself. Both count such responses. Reference, critic and evaluation always route by
    themselves."""

    rollout_logprobs_as_old: bool = False
    """Ratios are to the engines' logprobs; the trainer's own old logprobs are not computed."""

    minibatches: PositiveInt = 1
    """Optimizer steps per pass over a step's samples. Must divide prompts_per_step x samples_per_prompt."""

    epochs: PositiveInt = 1
    """Passes over a step's samples."""

    skip_groups_without_signal: bool = True
    """Leave out groups whose advantages are all zero, with their KL and entropy terms. The loss's means are then over
    the other groups alone, which makes the policy gradient larger: by the ratio of all tokens (or responses) to those
    that stay. token_sum has no mean, so its policy gradient stays the same. No effect where advantages are not made by
    group, for gpg (its own factor makes up for such groups), or if advantages are made after the logprobs: for otb, by
    teachers on the ranks, or if the KL penalty is in the reward. Rows with a teacher stay. Metrics count these groups
    either way."""

    # --- which passes over a step's batch this asks for, besides the update -------------------------------------------

    @property
    def computes_entropy(self) -> bool:
        """Returns whether the update computes the entropy."""
        return self.entropy_metric or self.entropy_coefficient > 0

    @property
    def kl_in_reward(self) -> bool:
        """Returns whether the KL penalty is a part of the reward, not of the loss."""
        return self.kl.placement == "reward" and self.kl.coefficient > 0

    @property
    def reads_batch(self) -> bool:
        """Returns whether advantages depend on results of the ranks: the KL in the reward, a critic's values, or
        tokens' energies."""
        return self.kl_in_reward or self.critic is not None or self.advantage.reads_energy

    @property
    def prepares_by_old_logprobs(self) -> bool:
        """Returns whether old logprobs weigh or choose a minibatch's tokens before its first gradient."""
        return self.correction.corrects or self.loss.chooses_tokens

    @property
    def needs_old_logprobs(self) -> bool:
        """Returns whether anything reads the policy's logprobs before the update begins. If not, and with one optimizer
        step, the update's own forward pass gives them."""
        before_update = self.kl_in_reward or self.advantage.reads_energy or self.prepares_by_old_logprobs
        return self.minibatches * self.epochs > 1 or before_update

    @property
    def computes_old_logprobs(self) -> bool:
        """Returns whether the ranks compute old logprobs in a pass of their own, instead of taking the engines'."""
        return self.needs_old_logprobs and not self.rollout_logprobs_as_old

    @property
    def advantages_by_token(self) -> list[str]:
        """Returns the settings by which the tokens of one response may have different advantages."""
        advantage = self.advantage
        discounted = isinstance(advantage, ReinforcePlusPlusConfig) and (advantage.discount < 1 or self.kl_in_reward)
        settings = {
            f"advantage: {advantage.name}": advantage.by_token or discounted,
            f"credit: {self.credit.name}": self.credit.by_turn,
            "distillation: sampled_token": self.teachers_advise,
        }
        return [setting for setting, differs in settings.items() if differs]

    @property
    def teachers_advise(self) -> bool:
        """Returns whether the teachers' part is in the advantages, not a term of the loss."""
        return self.distillation is not None and not self.distillation.objective.in_loss

    @property
    def skips_groups(self) -> bool:
        """Returns whether groups whose advantages are all zero may be left out of the batch."""
        return self.skip_groups_without_signal and self.advantage.by_group and not self.advantage.scales_by_signal

    @property
    def greedy_responses(self) -> int:
        """Returns the number of greedy responses to each prompt, beside its samples: the baseline of remax."""
        return int(self.advantage.name == "remax")

    def policy_learns(self, step: int) -> bool:
        """Returns whether the policy trains at `step`: the critic's warm-up, if there is one, is over."""
        return self.critic is None or step > self.critic.warmup_steps

    RULES: ClassVar[Rules[AlgorithmConfig]] = {
        "gae_without_critic": lambda a: a.advantage.name == "gae" and a.critic is None,
        "critic_without_gae": lambda a: a.critic is not None and a.advantage.name != "gae",
        "given_beside_sampled_baselines": lambda a: (
            a.distillation is not None
            and a.distillation.given_responses
            and (a.critic is not None or a.greedy_responses)
        ),
        "turns_that_are_not_compared": lambda a: a.credit.by_turn and not a.advantage.compares_turns,
        "penalty_on_turns": lambda a: a.credit.by_turn and a.kl_in_reward,
        "gdpo_penalty_in_reward": lambda a: a.advantage.name == "gdpo" and a.kl_in_reward,
        "kl_cov_of_one_step": lambda a: a.loss.name == "kl_cov" and a.minibatches * a.epochs == 1,
        "dppo_of_one_step": lambda a: (
            isinstance(a.loss, DivergenceLoss) and a.minibatches * a.epochs == 1 and not a.rollout_logprobs_as_old
        ),
        "energy_of_the_engines": lambda a: a.rollout_logprobs_as_old and a.advantage.reads_energy,
        "gmpo_by_token": lambda a: a.loss.name == "gmpo" and (by := a.advantages_by_token) and {"by": by},
        "old_logprobs_without_ratio": lambda a: (
            a.rollout_logprobs_as_old and not a.loss.has_ratio and not a.kl_in_reward
        ),
        "old_logprobs_with_correction": lambda a: a.rollout_logprobs_as_old and a.correction.corrects,
    }
