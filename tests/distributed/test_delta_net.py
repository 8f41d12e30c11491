"""A gated delta net over tensor and context ranks against one rank."""

from __future__ import annotations

import torch

from megagrpo.layout.parallel import ParallelLayout
from tests.distributed.delta_ranks import LENGTHS, SIZES, Parts, held, of_tokens, run
from tests.rank_group import run_ranks

KEYS, VALUES = SIZES.key_heads * SIZES.key_dim, SIZES.value_heads * SIZES.value_dim
ROWS = {"q": KEYS, "k": KEYS, "v": VALUES, "z": VALUES, "b": SIZES.value_heads, "a": SIZES.value_heads}


def random_parts() -> Parts:
    parts = {name: torch.randn(rows, SIZES.hidden) / 4 for name, rows in ROWS.items()}
    parts |= {f"{name}_conv": torch.randn(ROWS[name], 1, SIZES.kernel) / 2 for name in "qkv"}
    parts |= {name: torch.randn(SIZES.value_heads) for name in ("A_log", "dt_bias")}
    return parts | {"norm": torch.randn(SIZES.value_dim), "out": torch.randn(SIZES.hidden, VALUES) / 8}


def parts_of(parameters: dict[str, torch.Tensor]) -> Parts:
    """Reverses `held` of one rank."""
    parts = dict(zip(ROWS, parameters["in_proj.weight"].split(list(ROWS.values())), strict=True))
    conv = parameters["conv"].split([ROWS[name] for name in "qkv"])
    parts |= {f"{name}_conv": rows for name, rows in zip("qkv", conv, strict=True)}
    parts |= {name: parameters[name] for name in ("A_log", "dt_bias")}
    return parts | {"norm": parameters["out_norm.weight"], "out": parameters["out_proj.weight"]}


def test_every_layout_computes_what_one_rank_does() -> None:
    torch.manual_seed(0)
    inputs, upstream = ([torch.randn(length, SIZES.hidden) for length in LENGTHS] for _ in range(2))
    parts = random_parts()
    (one,) = run_ranks(1, run, ParallelLayout(), parts, inputs, upstream)
    outputs, inputs_grad = (x[: sum(LENGTHS)].split(LENGTHS) for x in (one.outputs, one.inputs_grad))
    for layout in (
        ParallelLayout(tensor=2),
        ParallelLayout(context=2),
        ParallelLayout(tensor=2, context=2),
        ParallelLayout(context=4),
    ):
        recomputed = layout.ranks == 4
        for rank, result in enumerate(run_ranks(layout.ranks, run, layout, parts, inputs, upstream, recomputed)):
            place = result.rows, result.positions
            torch.testing.assert_close(result.outputs, of_tokens(outputs, *place), rtol=0, atol=2e-6)
            torch.testing.assert_close(result.inputs_grad, of_tokens(inputs_grad, *place), rtol=0, atol=2e-5)
            wanted = held(parts_of(one.gradients), rank % layout.tensor, layout.tensor)
            for name, gradient in result.gradients.items():
                error = (gradient - wanted[name]).norm() / wanted[name].norm()
                assert error < 1e-5, f"{name} on rank {rank} of {layout}"
