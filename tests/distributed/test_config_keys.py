"""Every key of a config.json, dropped, changed or added: a model's logits are transformers', or the key is refused."""

from __future__ import annotations

import pytest

from tests.distributed.config_ranks import readings
from tests.rank_group import run_ranks
from tests.tiny_models import COMPOSITES, TINY_FAMILIES

FILES_DECIDE = ("mistral3",)
"""Models whose embeddings transformers ties by config.json, unless the files have a head of other values."""


@pytest.mark.long
@pytest.mark.parametrize("family", [*TINY_FAMILIES, *(its for its in COMPOSITES if its not in FILES_DECIDE)])
def test_a_changed_key_is_read_as_by_transformers_or_refused_by_name(family: str) -> None:
    ((cases, wrong),) = run_ranks(1, readings, family)
    print(f"{family}: {cases} cases")
    assert cases > 200
    assert not wrong
