"""Methods of the algorithm by their names, as a recipe gives them."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import TypeAdapter

from megagrpo.algorithm.advantages import AdvantageConfig, AdvantageMethod
from megagrpo.algorithm.aggregation import AggregationConfig, AggregationMethod
from megagrpo.algorithm.correction import RejectionConfig
from megagrpo.algorithm.policy_losses import PolicyLossConfig, PolicyLossMethod
from megagrpo.section import ByName

ADVANTAGES, LOSSES, AGGREGATIONS, REJECTIONS = map(
    TypeAdapter, (AdvantageConfig, PolicyLossConfig, AggregationConfig, RejectionConfig)
)


def advantage(**settings: Any) -> AdvantageMethod:
    return ADVANTAGES.validate_python(settings)


def loss(**settings: Any) -> PolicyLossMethod:
    return LOSSES.validate_python(settings)


def aggregation(**settings: Any) -> AggregationMethod:
    return AGGREGATIONS.validate_python(settings)


def names(union: Any) -> list[str]:
    """Those that a recipe may give, a user's own function aside."""
    members, by_name = get_args(union)
    return [name for name in by_name.members(members) if name != ByName.OWN]
