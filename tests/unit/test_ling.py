"""Ling 2: its files through ranks and back, and what its config.json may not say."""

from pathlib import Path
from typing import Any

import pytest

from megagrpo.errors import ModelError
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.rollout.kinds import ENGINES
from megagrpo.weights.families import architecture_of
from tests.ling_model import CONFIG, make_ling
from tests.safetensors_files import assert_same_files
from tests.weight_streams import through_ranks


def test_files_come_out_of_ranks_as_they_went_in(tmp_path: Path) -> None:
    model, _ = make_ling(tmp_path)
    for number, layout in enumerate([ParallelLayout(tensor=2, pipeline=2), ParallelLayout(data=2, expert=2)]):
        through_ranks(model, tmp_path / str(number), layout)
        assert_same_files(model, tmp_path / str(number))


def test_the_embedded_engine_refuses_it_before_a_run(tmp_path: Path) -> None:
    ling, glm = make_ling(tmp_path)
    (problem,) = ENGINES["transformers"].model_problems(ling)
    assert "no engine" in problem.fix
    assert not ENGINES["transformers"].model_problems(glm)


@pytest.mark.parametrize("model_type", ["bailing_moe", "bailing_moe_v2"])
def test_published_configs_differ_in_the_key_of_the_rotated_part(model_type: str) -> None:
    config = CONFIG | {"model_type": model_type}
    assert architecture_of(config | {"rotary_dim": None}) == architecture_of(config)
    assert architecture_of(without(config, "partial_rotary_factor")) == architecture_of(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rotary_dim", 4), ("use_qk_norm", False), ("moe_router_enable_expert_bias", False), ("norm_head", True),
        ("score_function", "softmax"), ("norm_topk_prob", False), ("use_bias", True), ("use_qkv_bias", True),
        ("moe_shared_expert_intermediate_size", 24), ("topk_group", 3), ("use_rmsnorm", False),
    ],
)  # fmt: skip
def test_other_parts_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ModelError, match=key):
        architecture_of(CONFIG | {key: value})


@pytest.mark.parametrize("key", ["use_qk_norm", "moe_router_enable_expert_bias", "n_group", "num_shared_experts"])
def test_keys_that_older_models_lack_are_needed(key: str) -> None:
    with pytest.raises(ModelError, match=key):
        architecture_of(without(CONFIG, key))


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}
