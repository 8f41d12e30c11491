"""The teachers' part of the objective: which teacher a row has, and how far the policy is from it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from megagrpo.errors import brief
from megagrpo.section import ByName, Fraction, PositiveFloat, Rules, Section, Tokens, entry_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Any

    from torch import Tensor

    from megagrpo.algorithm.advantage_method import Advantages
    from megagrpo.algorithm.ragged import Ragged

Divergence = Literal["reverse_kl", "forward_kl", "jsd"]
RATIO_MAX = 80.0
"""Log ratios of teacher to student are cut here: beyond it the mixture's share of the student is 0 in float32."""
TopK = Annotated[int, Field(ge=1, le=256)]


class SampledTokenConfig(Section):
    """weight x (log q - log p) of each sampled token, added to its advantage: reverse KL by token, as a reward.

    p: the policy's probability when it was sampled; q: the teacher's. MiniLLM, arXiv:2306.08543, without its sum over
    later tokens. Takes one number of each token from the teacher.
    """

    name: Literal["sampled_token"] = "sampled_token"

    in_loss: ClassVar[bool] = False
    on_ranks: ClassVar[bool] = False


class _DivergenceConfig(Section):
    """A divergence of two distributions at each token, added to the loss with its gradient."""

    in_loss: ClassVar[bool] = True
    on_ranks: ClassVar[bool] = True

    divergence: Divergence = "reverse_kl"
    """reverse_kl: KL(policy || teacher); forward_kl: KL(teacher || policy); jsd: beta KL(teacher || m) +
    (1 - beta) KL(policy || m), of their mixture m = beta teacher + (1 - beta) policy (GKD, arXiv:2306.13649)."""

    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The teacher's share of the mixture, for jsd."""

    RULES: ClassVar[Rules[_DivergenceConfig]] = {
        "beta_without_mixture": lambda objective: objective.given("beta") and objective.divergence != "jsd"
    }


class TeacherTopKConfig(_DivergenceConfig):
    """The divergence over the teacher's k most likely ids and all others as one event."""

    on_ranks: ClassVar[bool] = False

    name: Literal["teacher_top_k"] = "teacher_top_k"

    k: TopK = 32
    """Ids of each token."""


class StudentTopKConfig(_DivergenceConfig):
    """The divergence over the policy's k most likely ids and all others as one event. For teachers on the ranks."""

    name: Literal["student_top_k"] = "student_top_k"

    k: TopK = 32
    """Ids of each token."""


class FullVocabularyConfig(_DivergenceConfig):
    """The divergence over the whole vocabulary. For teachers on the ranks."""

    name: Literal["full_vocabulary"] = "full_vocabulary"

    temperature: PositiveFloat | None = None
    """Divides the logits of both. null: rollout.temperature."""


ObjectiveConfig = Annotated[
    SampledTokenConfig | TeacherTopKConfig | StudentTopKConfig | FullVocabularyConfig, ByName(default="sampled_token")
]


class GivenConfig(Section):
    """Responses of the data in place of sampled ones (GKD, arXiv:2306.13649): they learn from their teacher alone."""

    share: Fraction
    """Chance of each prompt that begins to have its row's response, and no other. The seed and the step decide. What
    dynamic sampling or oversampling drops is always sampled: given responses are then more of what is trained on."""

    column: str
    """Column of the data, one of extra_info's, with the response: the assistant's text, which the chat template
    renders. Rows without it, or without a teacher, are always sampled."""


class DistillationConfig(Section):
    """Learning from `teachers`: alone, or beside rewards."""

    objective: ObjectiveConfig = SampledTokenConfig()
    """Method by which the policy approaches its teacher. docs/distillation.md says when to use which."""

    weight: PositiveFloat = 1.0
    """Weight of the teachers' part beside that of the rewards."""

    by_source: dict[str, str | None] = {}
    """Teachers by a row's data_source: a name, or a pattern such as math*. A name comes before patterns, which are
    tried in the order written. null, or no entry: such rows have no teacher. Without `by_source` and `column` all rows
    have the only teacher."""

    column: str | None = None
    """Column of the data, one of extra_info's, with the name of a row's teacher. A row without it has the one that
    by_source says."""

    system: str | None = None
    """System message that teachers read and the policy does not (context distillation, arXiv:2209.15189): before the
    row's own, if it has one. null: teachers read the policy's prompts."""

    system_tokens_max: Tokens = 1024
    """Most tokens that `system` adds to a prompt."""

    given_responses: GivenConfig | None = None
    """Responses that are given, not sampled. null: all are sampled."""

    failed_share_max: Fraction = 0.5
    """The run ends if teachers fail on a larger share of a step's responses that they were asked about. A response on
    which its teacher failed is masked and counted."""

    RULES: ClassVar[Rules[DistillationConfig]] = {
        "given_without_divergence": lambda d: d.given_responses is not None and not d.objective.in_loss
    }

    def taught(self, advantages: Advantages, student: Ragged, teacher: Ragged) -> Advantages:
        """Returns advantages with weight x (log q - log p) added to each token that has a teacher.

        student, teacher: float [response tokens] log p and log q; q is NaN for tokens without a teacher, and in rows
        that are not trained on.
        """
        of_tokens = advantages.of_tokens
        before = np.repeat(advantages.of_rows, teacher.lengths) if of_tokens is None else of_tokens.values
        added = np.nan_to_num(self.weight * (teacher.values.astype(np.float64) - student.values), nan=0.0)
        after = teacher.with_values(before + added)
        return replace(advantages, of_rows=after.means(), of_tokens=after)

    def teacher_of(self, data_source: str, extra_info: Mapping[str, Any], teachers: Collection[str]) -> str | None:
        """Returns the name of a row's teacher, one of `teachers`, None without one. Raises ValueError, with what the
        row's column has, if it is another thing."""
        named = extra_info.get(self.column) if self.column is not None else None
        if named is not None:
            if not isinstance(named, str) or named not in ("", *teachers):
                raise ValueError(brief(named))
            return named or None
        if (entry := entry_of(data_source, self.by_source)) is not None:
            return self.by_source[entry]
        return None if self.by_source or self.column else next(iter(teachers))


def divergence_of_top(
    student_logprobs: Tensor, teacher_logprobs: Tensor, divergence: Divergence, beta: float
) -> Tensor:
    """Returns the divergence of student p from teacher q over k ids and all others as one event, [n].

    forward_kl: sum q log(q / p); reverse_kl: sum p log(p / q); jsd: beta KL(q || m) + (1 - beta) KL(p || m) with
    m = beta q + (1 - beta) p, 0 < beta < 1 (arXiv:2306.13649). It is at most the divergence over the vocabulary.
    Logprobs are finite, [n, k]: over the vocabulary, at the same distinct ids, of the teacher without a gradient.
    """
    log_p, log_q = with_rest(student_logprobs), with_rest(teacher_logprobs)
    if divergence == "forward_kl":
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    if divergence == "reverse_kl":
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    log_ratio = (log_q - log_p).clamp(max=RATIO_MAX)
    to_mixture = -(beta * log_ratio.expm1()).log1p()  # log p / m
    return (beta * log_q.exp() * (log_ratio + to_mixture) + (1 - beta) * log_p.exp() * to_mixture).sum(-1)


def with_rest(logprobs: Tensor) -> Tensor:
    """Appends the logprob of all other ids to [n, k]: [n, k + 1].

    Their probability, 1 - sum, is at least eight roundings of the sum. Less is noise, and has no gradient.
    """
    import torch

    total = logprobs.logsumexp(-1, keepdim=True)
    rest = (-total.expm1()).clamp(min=8 * torch.finfo(logprobs.dtype).eps)
    return torch.cat([logprobs, rest.log()], -1)
