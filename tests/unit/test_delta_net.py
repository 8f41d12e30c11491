"""A gated delta net over packed sequences against those of transformers on each sequence alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend known
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from megagrpo.layout.parallel import ParallelLayout
from tests.distributed.delta_ranks import LENGTHS, SIZES, Parts, held, run

CONFIG = {
    "hidden_size": SIZES.hidden,
    "linear_num_key_heads": SIZES.key_heads,
    "linear_num_value_heads": SIZES.value_heads,
    "linear_key_head_dim": SIZES.key_dim,
    "linear_value_head_dim": SIZES.value_dim,
    "linear_conv_kernel_dim": SIZES.kernel,
    "num_hidden_layers": 1,
    "layer_types": ["linear_attention"],
    "rms_norm_eps": 1e-6,
}
KEYS, VALUES = SIZES.key_heads * SIZES.key_dim, SIZES.value_heads * SIZES.value_dim


@pytest.fixture(autouse=True)
def group_of_one() -> Iterator[None]:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def reference(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if family == "qwen3_next":
        net = qwen3_next.Qwen3NextGatedDeltaNet(qwen3_next.Qwen3NextConfig(**CONFIG), 0)
    else:
        net = qwen3_5.Qwen3_5GatedDeltaNet(qwen3_5.Qwen3_5TextConfig(**CONFIG), 0)
    for parameter in (net.dt_bias, net.norm.weight):
        torch.nn.init.normal_(parameter, 1.0, 0.5)
    return net


def parts_of(family: str, tensors: dict[str, Tensor]) -> Parts:
    """Takes a reference's weights or gradients apart."""
    if family == "qwen3_next":
        group, value_rows = SIZES.value_heads // SIZES.key_heads, VALUES // SIZES.key_heads
        qkvz = tensors["in_proj_qkvz.weight"].unflatten(0, (SIZES.key_heads, -1))
        ba = tensors["in_proj_ba.weight"].unflatten(0, (SIZES.key_heads, -1)).split([group, group], 1)
        each = (*qkvz.split([SIZES.key_dim, SIZES.key_dim, value_rows, value_rows], 1), *ba)
        rows = [rows.flatten(0, 1) for rows in each]
    else:
        qkv = tensors["in_proj_qkv.weight"].split([KEYS, KEYS, VALUES])
        rows = [*qkv, *(tensors[f"in_proj_{name}.weight"] for name in "zba")]
    conv = tensors["conv1d.weight"].split([KEYS, KEYS, VALUES])
    others = {"A_log": "A_log", "dt_bias": "dt_bias", "norm": "norm.weight", "out": "out_proj.weight"}
    named = dict(zip(("q_conv", "k_conv", "v_conv"), conv, strict=True))
    return dict(zip("qkvzba", rows, strict=True)) | named | {ours: tensors[name] for ours, name in others.items()}


def passes(family: str, net: torch.nn.Module, inputs: list[Tensor], upstream: list[Tensor]) -> dict[str, Tensor]:
    """Returns outputs and all gradients of the reference on each sequence alone."""
    inputs = [tokens.clone().requires_grad_() for tokens in inputs]
    outputs = [net(tokens[None])[0] for tokens in inputs]
    torch.autograd.backward(outputs, upstream)
    gradients = parts_of(family, {name: parameter.grad for name, parameter in net.named_parameters()})
    found = {"outputs": torch.cat(outputs).detach(), "inputs": torch.cat([tokens.grad for tokens in inputs])}
    return found | held(gradients, 0, 1)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_it_is_as_near_to_exact_as_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = reference(family)
    inputs, upstream = ([torch.randn(length, SIZES.hidden) for length in LENGTHS] for _ in range(2))
    weights = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    theirs = passes(family, net, inputs, upstream)
    ours = run(ParallelLayout(), parts_of(family, weights), inputs, upstream)
    got = {"outputs": ours.outputs, "inputs": ours.inputs_grad} | ours.gradients
    net.zero_grad()
    monkeypatch.setattr(torch, "float32", torch.float64)  # it computes parts in float32, whatever its dtype
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    exact = passes(family, net.double(), *([x.double() for x in each] for each in (inputs, upstream)))
    for name, wanted in exact.items():
        real = got[name][: len(wanted)] if name in ("outputs", "inputs") else got[name]
        error, error_of_theirs = ((x - wanted).norm() / wanted.norm() for x in (real, theirs[name]))
        luck = 4 if wanted.numel() < 16 else 2  # sums over all tokens: their few errors are as large by chance
        assert error < luck * error_of_theirs, name
