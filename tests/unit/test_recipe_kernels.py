"""Layers that `auto` takes on each card, and the kernel of attention over packed sequences there."""

from dataclasses import replace

import pytest
from packaging.version import Version

from megagrpo.doctor import layers_finding
from megagrpo.recipe.kernels import Attention, Installed, layers_on

ALONE = Installed(transformer_engine=True)
WITH_2 = Installed(True, Version("2.8.3"))
WITH_3 = Installed(True, flash_attn_3=True)
DENSE, LATENT = Attention(128, 128, half=True), Attention(192, 128, half=True)
BIG, EXACT = Attention(256, 256, half=True), Attention(128, 128, half=True, deterministic=True)
ONLY_FLASH = Attention(128, 128, half=True, backend="flash")
FUSED, FLASH_2, FLASH_3 = "cuDNN's fused attention", "flash-attn 2", "flash-attn 3"


@pytest.mark.parametrize(
    ("card", "here", "model", "kernel"),
    [
        ((8, 0), ALONE, DENSE, None),
        ((8, 0), WITH_2, DENSE, FLASH_2),
        ((8, 0), Installed(True, Version("2.8.4")), DENSE, None),  # newer than Transformer Engine knows
        ((8, 0), WITH_2, LATENT, FLASH_2),
        ((8, 0), WITH_2, Attention(100, 90, half=True), None),
        ((8, 0), Installed(True, Version("2.4.0")), EXACT, None),
        ((8, 6), ALONE, DENSE, None),
        ((8, 6), WITH_3, DENSE, None),
        ((8, 6), WITH_2, BIG, None),
        ((8, 9), ALONE, DENSE, None),
        ((8, 9), WITH_2, DENSE, FLASH_2),
        ((9, 0), ALONE, DENSE, FUSED),
        ((9, 0), WITH_2, DENSE, FUSED),
        ((9, 0), ALONE, LATENT, FUSED),
        ((9, 0), ALONE, BIG, FUSED),
        ((9, 0), ALONE, Attention(192, 160, half=True), None),
        ((9, 0), WITH_3, Attention(100, 100, half=True), FLASH_3),
        ((9, 0), ALONE, Attention(128, 128, half=False), None),
        ((9, 0), ALONE, Attention(128, 128, half=True, context=4), FUSED),
        ((9, 0), ALONE, ONLY_FLASH, None),
        ((9, 0), WITH_2, ONLY_FLASH, FLASH_2),
        ((9, 0), WITH_3, replace(BIG, backend="flash", deterministic=True), None),
        ((10, 0), ALONE, DENSE, FUSED),
        ((10, 0), ALONE, LATENT, FUSED),
        ((10, 0), ALONE, BIG, None),
        ((10, 0), WITH_2, BIG, FLASH_2),
        ((10, 3), ALONE, DENSE, FUSED),
        ((12, 0), ALONE, DENSE, FUSED),
        ((12, 0), ALONE, LATENT, None),
        ((12, 0), ALONE, EXACT, None),
        ((12, 0), WITH_2, EXACT, FLASH_2),
        ((12, 0), Installed(True, Version("2.6.3")), ONLY_FLASH, None),  # older than Blackwell
    ],
)
def test_auto_takes_transformer_engine_where_it_has_fused_attention(card, here, model, kernel) -> None:
    found = layers_on(card, here, model)
    assert found.spec == ("local" if kernel is None else "transformer_engine")
    assert kernel is None or found.kernel == kernel
    assert layers_on(card, Installed(), model).spec == "local"


def test_local_layers_leave_flash_attention_with_context_ranks_and_latent_attention() -> None:
    kernels = [
        layers_on((8, 0), ALONE, model).kernel for model in (DENSE, LATENT, Attention(128, 128, True, context=2))
    ]
    assert [kernel.split()[1] for kernel in kernels] == ["flash", "memory-efficient", "memory-efficient"]


def test_the_doctor_says_which_layers_run_and_what_would_be_faster() -> None:
    fine, slow = layers_finding((9, 0), ALONE), layers_finding((8, 6), ALONE)
    assert (fine.state, fine.remedy) == ("ok", "")
    assert "transformer_engine, attention by cuDNN" in fine.found
    assert slow.state == "doubtful"
    assert "flash-attn 2.8.3" in slow.remedy
    assert layers_finding((8, 6), Installed()).state == "ok"
