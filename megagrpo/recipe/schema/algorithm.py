"""algorithm: from scores to advantages, and the loss. The methods are in megagrpo/algorithm/."""

from __future__ import annotations

from collections.abc import Iterator

from megagrpo.algorithm.advantages import AdvantageConfig, GrpoConfig, ReinforcePlusPlusConfig
from megagrpo.algorithm.aggregation import AggregationConfig, TokenMeanConfig
from megagrpo.algorithm.correction import CorrectionConfig
from megagrpo.algorithm.credit import CreditConfig, OutcomeConfig
from megagrpo.algorithm.critic import CriticConfig
from megagrpo.algorithm.kl import KLConfig, ReferenceConfig
from megagrpo.algorithm.policy_losses import PolicyLossConfig, PpoClipConfig
from megagrpo.errors import Problem
from megagrpo.section import NonNegativeFloat, PositiveInt, Section


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

    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""

    entropy_metric: bool = True
    """Report the policy's entropy. false: it is computed for an entropy bonus only."""

    aggregation: AggregationConfig = TokenMeanConfig()
    """Reduction of losses per token to one. token_mean: mean over the minibatch's tokens. seq_mean_...: mean over
    responses of each one's sum, mean, or sum / divisor (Dr.GRPO). token_sum: sum over the minibatch's tokens."""

    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction between engines and trainer."""

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
    group, for gpg (its own factor makes up for such groups), or if the KL penalty is in the reward. Metrics count these
    groups either way."""

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
        """Returns whether advantages depend on results of the ranks: the KL in the reward, or a critic's values."""
        return self.kl_in_reward or self.critic is not None

    @property
    def prepares_by_old_logprobs(self) -> bool:
        """Returns whether old logprobs weigh or choose a minibatch's tokens before its first gradient."""
        return self.correction.corrects or self.loss.chooses_tokens

    @property
    def needs_old_logprobs(self) -> bool:
        """Returns whether anything reads the policy's logprobs before the update begins. If not, and with one optimizer
        step, the update's own forward pass gives them."""
        return self.minibatches * self.epochs > 1 or self.kl_in_reward or self.prepares_by_old_logprobs

    @property
    def computes_old_logprobs(self) -> bool:
        """Returns whether the ranks compute old logprobs in a pass of their own, instead of taking the engines'."""
        return self.needs_old_logprobs and not self.rollout_logprobs_as_old

    @property
    def advantages_by_token(self) -> bool:
        """Returns whether the tokens of one response may have different advantages."""
        advantage = self.advantage
        discounted = isinstance(advantage, ReinforcePlusPlusConfig) and (advantage.discount < 1 or self.kl_in_reward)
        return advantage.by_token or discounted or self.credit.by_turn

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

    # --- rules --------------------------------------------------------------------------------------------------------

    def rules(self) -> Iterator[Problem]:
        yield from self._critic_rules()
        yield from self._credit_rules()
        if self.reference.update_every_steps is not None and self.kl.coefficient == 0:
            given = f"{self.reference.update_every_steps}, with algorithm.kl.coefficient 0"
            needed = "a reference policy: there is none without a KL penalty"
            yield Problem("reference.update_every_steps", given, needed, "remove it, or give a coefficient")
        if self.advantage.name == "gdpo" and self.kl_in_reward:
            needed = "loss: gdpo never forms the sum of all rewards, which the penalty would change"
            yield Problem("kl.placement", "reward, with algorithm.advantage.name: gdpo", needed, "placement: loss")
        if self.loss.name == "kl_cov" and self.minibatches * self.epochs == 1:
            needed = "at least 2: its penalty, |log ratio|, has no gradient before the policy has moved"
            yield Problem("loss.name", "kl_cov with one optimizer step for each batch", needed, "minibatches: 2")
        if self.loss.name == "gmpo" and self.advantages_by_token:
            by = f"credit: {self.credit.name}" if self.credit.by_turn else self.advantage.name
            given = f"gmpo, with advantages by token ({by})"
            needed = "one advantage for each response: the geometric mean over it is bounded on the side of its sign"
            yield Problem("loss.name", given, needed, "name: ppo_clip or gspo, or an advantage such as grpo")
        if self.rollout_logprobs_as_old and not self.loss.has_ratio and not self.kl_in_reward:
            given = f"true, with loss: {{name: {self.loss.name}}}"
            needed = "false: this loss has no ratio, so nothing would read the old logprobs or be corrected by them"
            yield Problem("rollout_logprobs_as_old", given, needed, "remove it, and write correction: {weights: token}")
        if self.rollout_logprobs_as_old and self.correction.corrects:
            needed = "false: the old logprobs are the engines', so every weight would be 1 and nothing be left out"
            fix = "remove one of them: ratios to the engines' logprobs are a correction by themselves"
            yield Problem("rollout_logprobs_as_old", "true, with a correction", needed, fix)

    def _credit_rules(self) -> Iterator[Problem]:
        if not self.credit.by_turn:
            return
        if not self.advantage.compares_turns:
            given = f"{self.credit.name}, with algorithm.advantage.name: {self.advantage.name}"
            needed = "grpo, rloo, opo, gpg or reinforce_plus_plus_baseline: turns are compared as responses are"
            yield Problem("credit.name", given, needed, "advantage: grpo, or credit: outcome")
        if self.kl_in_reward:
            given = f"reward, with algorithm.credit: {self.credit.name}"
            needed = "loss: rewards of turns are those of the agent, without a penalty"
            yield Problem("kl.placement", given, needed, "placement: loss, or credit: outcome")

    def _critic_rules(self) -> Iterator[Problem]:
        name = self.advantage.name
        if name == "gae" and self.critic is None:
            given = "no critic, with algorithm.advantage.name: gae"
            yield Problem("critic", given, "a critic: gae is made from its values", "critic: {lr: 1e-5}")
        if self.critic is not None and name != "gae":
            given = f"a critic, with algorithm.advantage.name: {name}"
            needed = "nothing: only gae reads its values"
            yield Problem("critic", given, needed, "remove it, or write advantage: {name: gae}")
