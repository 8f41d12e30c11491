"""The reasons for which families are refused on SGLang hold for the installed one."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.rollout.sglang import launch
from megagrpo.weights.families import FAMILIES, sglang_classes
from tests.ling_model import CONFIG
from tests.sglang.model_parameters import parameters
from tests.tiny_models import DIMENSIONS, LIKE, config_of

TOWERS = ("gemma3", "mistral3")
CODE = {"mimo": DIMENSIONS, "bailing_moe": CONFIG, "bailing_moe_v2": CONFIG}


def refused_with(of_class: sglang_classes.SglangClass) -> set[str]:
    return {name for name, family in FAMILIES.items() if family.sglang is of_class}


@pytest.mark.soak
def test_families_are_refused_for_what_sglang_does(tmp_path: Path) -> None:
    for family, keys in CODE.items():
        (tmp_path / family).mkdir()
        (tmp_path / family / "config.json").write_text(json.dumps(keys | {"model_type": family}))
    for family in TOWERS:
        config = config_of(family)
        config.architectures = [type(config).__name__.replace("Config", "ForConditionalGeneration")]
        config.save_pretrained(tmp_path / family)
    told = subprocess.run([sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr[-3000:]
    unknown, with_tower, bias = json.loads(told.stdout.splitlines()[-1])
    refused = refused_with(sglang_classes.NEEDS_CODE), refused_with(sglang_classes.NO_ENGINE)
    assert set(unknown) == set.union(*refused) == set(CODE)
    assert refused[1] == set(CODE) - set(transformers.CONFIG_MAPPING.keys()) - set(LIKE)
    assert set(with_tower) == refused_with(sglang_classes.HOLDS_TOWER) == set(TOWERS)
    assert bias == "ignored"


def unknown_types(directory: Path) -> list[str]:
    """Families whose config.json SGLang does not read without the model's code."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    found = []
    for family in CODE:
        with pytest.raises(ValueError, match=f"model type `{family}`"):
            get_config(str(directory / family), trust_remote_code=False)
        found.append(family)
    return found


def classes_with_towers(directory: Path) -> list[str]:
    """Composites whose class has parameters of a tower, with the arguments of a server that asks for none."""
    importlib.import_module("sglang.srt.models.registry")  # by which mistral3's class finds that of its text model
    held = {family: parameters(str(directory / family), EngineLayoutConfig(), None)[0] for family in TOWERS}
    return [family for family, names in held.items() if any("vision_tower" in name for name in names)]


def bias_on_gpus() -> str:
    """Tell if a choice of experts by softmax scores takes the bias on GPUs."""
    from sglang.srt.layers.moe import topk

    given: list[Any] = []

    def gate(logits: torch.Tensor, bias: torch.Tensor | None, count: int, **_: Any) -> tuple[torch.Tensor, ...]:
        given.append(bias)
        return torch.zeros(len(logits), count), torch.zeros(len(logits), count, dtype=torch.int32)

    sys.modules["sglang.kernels.ops.moe.moe_fused_gate"] = SimpleNamespace(moe_fused_gate=gate)  # type: ignore[assignment]
    vars(topk).update(_is_cuda=True, _is_cpu=False)
    topk.fused_topk(torch.zeros(3, 4), torch.zeros(3, 8), 2, True, torch.ones(1, 8), "softmax")
    return "ignored" if given == [None] else "taken"


if __name__ == "__main__":
    os.environ[launch.DEVICE_VARIABLE] = "cpu"
    launch.fill_gaps_on_cpus()
    root = Path(sys.argv[1])
    print(json.dumps([unknown_types(root), classes_with_towers(root), bias_on_gpus()]))
