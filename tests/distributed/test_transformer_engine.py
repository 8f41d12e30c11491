"""Transformer Engine's layers, from tests/te_stub, compute what transformers does, and take plain torch's step.

Megatron's own layers are tested in the other files of this folder. Wrong marks and quirks in the stub are noticed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megagrpo.batching.rank_batches import RankBatch
from megagrpo.layout.parallel import ParallelLayout
from megagrpo.megatron import config
from megagrpo.megatron.rank import TrainRank
from megagrpo.recipe.load import load
from tests.distributed.conftest import CaseOf, Tiny
from tests.distributed.layouts import KINDS, ROWS, Row, soak
from tests.distributed.step_case import (
    Case,
    StepResult,
    assert_same_step,
    differences,
    grpo_step,
    load_reference,
    make_recipe,
)
from tests.distributed.step_ranks import gather, load_and_pass, on_ranks, save, states_of, step, update
from tests.distributed.te_ranks import tensors_elsewhere
from tests.distributed.test_parity_logits import check
from tests.distributed.test_step_parity import recipe_of
from tests.golden.record_te_manifest import TARGET, record
from tests.rank_group import RankGroupError, run_ranks
from tools.recipe_docs import YAML_RECIPES

TE = {"layer_spec": "transformer_engine"}


OFTEN = ("all", "virtual, context", "tensor, unequal", "expert over tensor", "four tensor ranks")
STEPS = ["tensor, data", *(pytest.param(name, marks=pytest.mark.long) for name in OFTEN)]
STEPS += soak(*(name for name in ROWS if name not in ("tensor, data", *OFTEN)))


# Whole steps, below, show forward passes too; of one family in each row.
@pytest.mark.parametrize("name", ["one rank", *soak(*(name for name in ROWS if name != "one rank"))])
def test_every_family_agrees_with_transformers(name: str, tiny: Tiny) -> None:
    row = ROWS[name]
    families = [family for family, kind in KINDS.items() if kind == row.kind or name == "one rank"]
    check([tiny(family, **row.changes) for family in families], row.layout, TE["layer_spec"])


def test_a_rotary_embedding_without_yarn_agrees_with_transformers(tiny: Tiny) -> None:
    """Megatron does not fuse it, and takes the row of each position from a table."""
    plain = {"q_lora_rank": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    check([tiny("deepseek_v3", **plain)], ParallelLayout(tensor=2, expert_tensor=2), TE["layer_spec"])


@pytest.fixture(scope="module")
def in_torch(case_of: CaseOf) -> Callable[[Row], tuple[Case, StepResult]]:
    @cache
    def made(family: str, **changes: int) -> tuple[Case, StepResult]:
        case = case_of(family, **changes)
        return case, grpo_step(case, recipe_of(family, ParallelLayout()), load_reference(case.directory))

    return lambda row: made(row.family, **row.changes)


def step_of(row: Row, case: Case, first: Callable[[], None] | None = None, **train: Any) -> StepResult:
    found = on_ranks(step, recipe_of(row.family, row.layout, **TE, **train), case, first=first)
    return gather(found, with_gradients=not train.get("distributed_optimizer"))


@pytest.mark.parametrize("name", STEPS)
def test_every_layout_takes_the_step_of_plain_torch(name, in_torch):
    """Among other things the gradient norm, which does not depend on how many ranks hold a weight."""
    case, wanted = in_torch(ROWS[name])
    assert_same_step(step_of(ROWS[name], case), wanted)


NEWER = ("dots1", "glm4_moe_lite", "kimi_k2", "phi3", "qwen3_moe_mixed", "seed_oss")


@pytest.mark.parametrize("name", ["all", *soak("one rank", "expert over tensor")])
@pytest.mark.parametrize("family", [pytest.param("qwen2_moe", marks=pytest.mark.long), *soak(*NEWER)])
def test_newer_families_take_the_step_of_plain_torch(family: str, name: str, case_of: CaseOf) -> None:
    """With the epsilon that latent attention has here."""
    case, row = case_of(family, rms_norm_eps=1e-6), Row(ROWS[name].of(family), family)
    wanted = grpo_step(case, recipe_of(family, ParallelLayout()), load_reference(case.directory))
    assert_same_step(step_of(row, case), wanted)


SMALLER = {
    "math_qwen3_30b_a3b_2x8": Row(ParallelLayout(tensor=2, data=2, expert=2), "qwen3_moe"),
    "deepseek_v3_671b": Row(ParallelLayout(tensor=2, pipeline=2, expert=2), "deepseek_v3"),
    "math_qwen3_32b_4x8": Row(ParallelLayout(pipeline=2, data=2), "qwen3"),
    "grpo_70b": Row(ParallelLayout(tensor=2, pipeline=2), "llama"),
    "math_qwen3_32b_8h200": Row(ParallelLayout(pipeline=2, virtual_pipeline=2), "qwen3"),
}
"""Layouts of the shipped recipes, with fewer layers and ranks."""


@pytest.mark.parametrize(
    "name", ["math_qwen3_30b_a3b_2x8", *soak(*(name for name in SMALLER if name != "math_qwen3_30b_a3b_2x8"))]
)
def test_with_a_recipes_options_it_is_the_same_step(name, in_torch):
    """Kernels for experts, what is computed again, exchanges beside passes, outputs of stages that are freed."""
    row, train = SMALLER[name], load(YAML_RECIPES / f"{name}.yaml").recipe.train
    again = {"layers": 1} if train.recomputed.layers else train.recompute
    options = {"recompute": again, "overlap": train.overlap, "megatron": train.megatron}
    case, wanted = in_torch(row)
    if train.overlap:  # each data rank then has sums of its share of the gradients alone
        options, wanted = options | {"distributed_optimizer": True}, replace(wanted, gradients={})
    assert_same_step(step_of(row, case, **options), wanted)


def narrow_moments(rank: TrainRank, batch: RankBatch, advantages: Any, saved: Path, resume: bool) -> Any:
    """Two steps with a checkpoint between them, or the second from that checkpoint, everything away and back before it.
    The state after the second, and after the first."""
    states = []
    if resume:
        rank.load(saved)
    else:
        load_and_pass(rank, batch)
        update(rank, advantages)
        save(rank, saved)
    states.append(states_of(rank.policy))
    if resume:
        rank.release(["parameters", "gradients", "optimizer"])
        rank.restore(["parameters", "gradients", "optimizer"])
    load_and_pass(rank, batch)
    update(rank, advantages)
    return [*states, states_of(rank.policy)]


def test_moments_in_bfloat16_are_saved_resumed_and_moved_like_others(case_of: CaseOf, tmp_path: Path) -> None:
    """Main weights are then in the optimizer's own state."""
    saved, layout = tmp_path / "saved", ROWS["tensor, data"].layout
    saved.mkdir()
    optimizer = {"lr": 1e-3, "moment_dtype": "bfloat16"}
    train = TE | {"optimizer": optimizer, "gradient_dtype": "bfloat16"}
    recipe = make_recipe(layout, model={"path": "unused", "dtype": "bfloat16"}, train=train)
    case = case_of("qwen3")
    without, resumed = (on_ranks(narrow_moments, recipe, case, saved, resume) for resume in (False, True))
    for wanted, found in zip(without, resumed, strict=True):
        kinds = {name.partition(".")[0]: str(tensor.dtype) for name, tensor in wanted[0].items()}
        assert (kinds["param"], kinds["exp_avg"], kinds["exp_avg_sq"]) == (
            "torch.float32", "torch.bfloat16", "torch.bfloat16",
        )  # fmt: skip
        for before, after in zip(wanted, found, strict=True):
            assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        assert any((tensor != wanted[1][name]).any() for name, tensor in wanted[0].items() if "param." in name)


# --- what would be noticed --------------------------------------------------------------------------------------------


def columns_not_marked() -> None:
    """Weights that are cut over tensor ranks count on one of them only."""
    from transformer_engine.pytorch.module import TransformerEngineBaseModule

    TransformerEngineBaseModule.mark = lambda *_: None


def norms_not_marked() -> None:
    """Tensor ranks keep their own tokens' gradients of the norms inside linear layers."""
    from transformer_engine.pytorch import module

    made = module.LayerNormLinear.__init__

    def unmarked(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.layer_norm_weight.sequence_parallel = False

    module.LayerNormLinear.__init__ = unmarked


def gate_and_up_swapped() -> None:
    from transformer_engine.pytorch import module

    forward = module.LayerNormLinear.forward

    def swapped(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = forward(self, *args, **kwargs)
        return out if self.use_bias else torch.cat(out.chunk(2, -1)[::-1], -1)  # only queries have a bias

    module.LayerNormLinear.forward = swapped


def every_microbatch_first() -> None:
    """Each microbatch's gradient replaces the one before."""
    from transformer_engine.pytorch import module

    kept = module.weight_gradient
    module.weight_gradient = lambda weight, found, fuse, _: kept(weight, found, fuse, True)


@pytest.mark.parametrize(
    ("wrong", "name", "shows"),
    [
        (columns_not_marked, "tensor", "grad norm"),
        *soak((norms_not_marked, "tensor", "ranks"), (gate_and_up_swapped, "tensor", "loss")),
        (every_microbatch_first, "one rank", "gradient"),
    ],
)
def test_a_wrong_mark_would_be_noticed(wrong, name, shows, in_torch):
    case, wanted = in_torch(ROWS[name])
    if shows == "ranks":
        with pytest.raises(AssertionError, match="Arrays are not equal"):
            step_of(ROWS[name], case, first=wrong)
        return
    found = differences(step_of(ROWS[name], case, first=wrong), wanted)
    assert found[shows] > 1e-2, found


def without_refusals() -> None:
    config.ALLOWED_VALUES.clear()


@pytest.mark.parametrize(
    ("options", "layout", "error"),
    [
        ({"fp8": "hybrid"}, ParallelLayout(), "divisible by 8"),
        ({"tp_comm_overlap": True}, ParallelLayout(tensor=2), r"initialize_ub\(\) must be called"),
        ({"cp_comm_type": "all_gather"}, ParallelLayout(context=2), "No dot product attention backend"),
    ],
)
def test_what_is_refused_would_end_a_run(options, layout, error, in_torch):
    row = Row(layout, "qwen2_tied")
    with pytest.raises(RankGroupError, match=error):
        step_of(row, in_torch(row)[0], first=without_refusals, megatron=options)


def test_deterministic_mode_runs(in_torch):
    """Transformer Engine asks for an environment variable with it."""
    case, wanted = in_torch(ROWS["one rank"])
    assert_same_step(step_of(ROWS["one rank"], case, megatron={"deterministic_mode": True}), wanted)


# --- where tensors are, and weights' names ----------------------------------------------------------------------------


def test_every_tensor_of_a_model_is_on_the_ranks_device(tiny: Tiny) -> None:
    directories, specs = [tiny(family) for family in KINDS], ["local", "transformer_engine"]
    (elsewhere,) = run_ranks(1, tensors_elsewhere, directories, specs, transformer_engine=True)
    assert elsewhere == []


def recorded(rank: int, store: str) -> list[Any]:
    return [record(case) for case in json.loads(TARGET.read_text())["cases"]]


def test_the_recorded_names_and_shards_are_those_of_the_stub() -> None:
    (found,) = run_ranks(1, recorded, joined=False, transformer_engine=True)
    assert json.loads(json.dumps(found)) == [case["ranks"] for case in json.loads(TARGET.read_text())["cases"]]
