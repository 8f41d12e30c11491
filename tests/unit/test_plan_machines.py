"""Kinds of GPUs, and the assumptions that a user may give."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.errors import RecipeError
from megagrpo.plan.assumptions import Assumptions, Lengths, assumptions_from
from megagrpo.plan.case import GPUS, gpu, machines_of
from megagrpo.recipe.load import load
from tests.tiny_run import make_run


def test_every_gpu_has_plausible_figures_and_a_source():
    for name, kind in GPUS.items():
        assert kind.name == name
        assert "NVIDIA" in kind.source
        assert 20 < kind.memory_bytes / 2**30 < 300, name
        assert 50e12 < kind.flops < 3e15, name
        assert 0.3e12 <= kind.memory_bytes_per_second <= 8e12, name
        assert 30e9 < kind.node_bytes_per_second <= 900e9, name
        # What no card exceeds: sparse FLOPs by mistake would.
        assert kind.flops / kind.memory_bytes_per_second < 450, name


@pytest.mark.parametrize(
    ("written", "meant"),
    [("h100", "H100"), ("H1000", "H100"), ("A100", "A100-80GB"), ("A10", "A10G"), ("RTX 4090", "RTX-4090")],
)
def test_an_unknown_gpu_is_refused_with_the_nearest_name(written, meant):
    with pytest.raises(RecipeError, match=f"did you mean {meant}\\?") as refused:
        gpu(written)
    assert refused.value.problems[0].where == "cluster.gpu"
    for unlike in ("MI300X", "V100"):
        with pytest.raises(RecipeError) as refused:
            gpu(unlike)
        assert refused.value.problems[0].fix == ""


def test_machines_come_from_the_cluster_and_the_assumed_network(tmp_path):
    path = make_run(tmp_path)
    assert machines_of(load(path).recipe, Assumptions()) is None
    recipe = load(path, ["cluster.gpu=H200", "cluster.gpus_per_node=4"]).recipe
    machines = machines_of(recipe, Assumptions(network_bytes_per_second=25e9))
    assert (machines.gpu.name, machines.gpus_per_node, machines.network_bytes_per_second) == ("H200", 4, 25e9)


def test_assumptions_are_given_by_name():
    assert assumptions_from([]) == Assumptions()
    assert assumptions_from(["overlap=0", "response_tokens = 700"]) == Assumptions(overlap=0.0, response_tokens=700.0)
    defaults = {field.name: field.default for field in fields(Assumptions) if field.default is not None}
    assert assumptions_from([f"{name}={default}" for name, default in defaults.items()]) == Assumptions()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("decode_eficiency=0.5", "did you mean decode_efficiency?"),
        ("decode_efficiency=fast", "a number"),
        ("decode_efficiency", "a number"),
        ("decode_efficiency=1.5", "at most 1"),
        ("decode_efficiency=0", "at least 1e-15"),
        ("disk_bytes_per_second=0", "at least 1e-15"),
        ("matrix_efficiency=1e-320", "at least 1e-15"),
        ("driver_seconds=-1", "at least 0"),
        ("update_factor=nan", "at least 1e-15"),
        ("response_tokens=1e300", "at most 1e+15"),
        ("=", "given: nothing"),
    ],
)
def test_a_bad_assumption_is_refused_with_what_it_should_be(text, says):
    with pytest.raises(RecipeError) as refused:
        assumptions_from(["overlap=0.5", text, "packing=2"])
    assert says in str(refused.value)
    assert len(refused.value.problems) == 2  # all bad ones at once


@given(longest=st.floats(1, 1e5), share=st.floats(0.01, 1), prompt=st.floats(0, 1e4))
def test_the_curve_of_lengths_has_the_mean_and_the_square_that_it_states(longest, share, prompt):
    lengths = Lengths(prompt, share * longest, longest)
    assert lengths.alive(0.0) == 1.0
    assert lengths.alive(longest) == 0.0
    points = 2000
    width = longest / points
    middles = [(i + 0.5) * width for i in range(points)]
    alive = [lengths.alive(at) for at in middles]
    assert sum(alive) * width == pytest.approx(lengths.response, rel=1e-2)
    square = 2 * sum(at * share for at, share in zip(middles, alive, strict=True)) * width
    assert square == pytest.approx(lengths.response_square, rel=1e-2)
    assert lengths.sequence_square >= lengths.sequence**2 * (1 - 1e-9)
