"""Every key of a config.json, dropped, changed or added: a model's logits are transformers', or the key is refused."""

from __future__ import annotations

import pytest

from tests.distributed.config_ranks import readings
from tests.rank_group import run_ranks
from tests.tiny_models import COMPOSITES, TINY_FAMILIES

OF_COMPOSITES = (
    "tie_word_embeddings = dropped: logits differ",  # a head in the files of other values is not tied
    "multimodal_projector_bias = True: other tensors",
    "spatial_merge_size = ",
)
"""Faults of whole composites that are none of the text model that the files hold."""


@pytest.mark.long
@pytest.mark.parametrize("family", [*TINY_FAMILIES, *COMPOSITES])
def test_a_changed_key_is_read_as_by_transformers_or_refused_by_name(family: str) -> None:
    ((cases, wrong),) = run_ranks(1, readings, family)
    print(f"{family}: {cases} cases")
    assert cases > 200
    if family in ("gemma3", "mistral3"):  # the others' towers are not loaded
        wrong = [fault for fault in wrong if not fault.startswith(OF_COMPOSITES)]
    assert not wrong
