"""Imports of driver and actors, and ends of a plan that was made from manifests in another order."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megagrpo.algorithm.mismatch import Mismatch
from megagrpo.cluster.actors import RankActor, allocator_environment
from megagrpo.errors import RecipeError, WeightSyncError
from megagrpo.megatron.model_rank import ModelRank
from megagrpo.preflight.machine import device_problems
from megagrpo.rank_results import CriticMetrics, SftUpdate, StepMetrics, TokenLoss
from megagrpo.weights.boxes import Manifest
from megagrpo.weights.plan import make_plan, require_own
from megagrpo.weights.transport.sglang import ServerWeights
from tests import plans
from tests.rollout_engines import model_directory, start_engine

# What an actor's process does: import the actor's module, receive a recipe, start. The start ends at the first import
# of torch, which asks CUDA for its devices once.
SCRIPT = """
import os, sys
import megagrpo.recipe.schema
from megagrpo.cluster import actors, engines
from megagrpo.rollout.kinds import ENGINES
from types import SimpleNamespace
assert "torch" not in sys.modules, "imported before the GPUs can be hidden from it"

class TorchImported(BaseException):
    def find_spec(self, name, *given):
        if name == "torch":
            raise self

del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
sys.meta_path.insert(0, TorchImported())
recipe = SimpleNamespace(rollout=SimpleNamespace(kind=ENGINES["transformers"]), deterministic=False)
spec = SimpleNamespace(device="cpu", gpus=(), recipe=recipe, server=None)
for actor, arguments in ((actors.RankActor, (recipe, 0, "", "", "cpu")), (engines.EngineActor, (spec,))):
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    try:
        actor.__ray_metadata__.modified_class().start(*arguments)
    except TorchImported:
        print([os.environ["CUDA_VISIBLE_DEVICES"], os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)])
"""


def test_an_actor_for_the_cpu_hides_the_gpus_before_it_imports_torch_and_a_rank_orders_its_kernels() -> None:
    environment = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["['', '1']", "['', None]"], done.stderr


# The driver imports neither Megatron nor an engine: its actors use them, and they would cost every start seconds.
IMPORT = """
import pickle, sys
import megagrpo.recipe.load
print("torch" in sys.modules)
import megagrpo.trainer.sft, megagrpo.trainer.train
pickle.load(sys.stdin.buffer)
actors_only = "megatron", "megagrpo.megatron", "aiohttp"
engines = "megagrpo.rollout.transformers_engine", "megagrpo.rollout.sglang.engine"
print([name for name in (*actors_only, *engines) if name in sys.modules])
"""
MISMATCH = Mismatch(*(0.0,) * len(Mismatch.__dataclass_fields__))
ANSWERS = (
    StepMetrics(0.5, 0.5, None, 1.0, 0.0, 0.0, 1.0, MISMATCH, None, 1.0, 0),
    CriticMetrics(0.5, 0.0, 0.0, 0.0, 0.0, 1.0, 0),
    SftUpdate(TokenLoss(1.0, 2), 1.0),
)


def test_a_recipe_is_read_without_torch_and_drivers_read_answers_without_what_only_their_actors_use() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT],
        input=pickle.dumps(ANSWERS),
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        timeout=600,
    )
    # A rank must not import torch before it has chosen its device.
    assert done.stdout.decode().splitlines() == ["False", "[]"], done.stderr.decode()


class RankOf(ModelRank):
    """A rank that holds one manifest, and no tensors."""

    def __init__(self, manifest: Manifest) -> None:
        self.policy: Any = SimpleNamespace(
            manifest=lambda: manifest, trained_adapters=SimpleNamespace(manifest=manifest)
        )


def test_every_end_refuses_a_plan_made_from_manifests_in_another_order(tmp_path: Path) -> None:
    engine = start_engine(model_directory("qwen2", tmp_path))
    (held,) = engine.manifests()
    elsewhere = replace(held, holder="engine 1 rank 0")
    own, other = replace(held, holder="train rank 0"), replace(held, holder="train rank 1")
    plan = make_plan([other, own], [elsewhere, held])
    rank, actor = RankOf(own), RankActor.__ray_metadata__.modified_class()
    actor.rank = rank
    server = ServerWeights(lambda *_: None, "engine 0", [held], {})
    export: Any = None  # these are not reached
    channel: Any = None

    for open_end, end in (
        (lambda: actor.connect(plan, 0, channel), own),
        (lambda: rank.write_export(export, plan, 0, adapters=False), own),
        (lambda: rank.write_export(export, plan, 0, adapters=True), own),
        (lambda: engine.connect(plan, [0], channel), held),
        (lambda: server.connect(plan, [0], channel), held),
    ):
        planned = other if end is own else elsewhere
        with pytest.raises(WeightSyncError, match=f"{end.holder}: (.|\n)*the manifest of {planned.holder}\n"):
            open_end()
    with pytest.raises(WeightSyncError, match="with other boxes"):
        require_own(replace(own, placements=own.placements[1:]), own)
    require_own(plan.sources[1], own)


def test_only_ranks_whose_memory_no_engine_maps_have_expandable_segments() -> None:
    named = {
        way: allocator_environment(plans.recipe({"weights.transfer": way}))
        for way in ("auto", "shared_memory", "two_hops", "process_group", "disk")
    }
    assert named["auto"] == named["shared_memory"] == named["two_hops"] == {}
    assert named["process_group"] == named["disk"] == allocator_environment(plans.sft_recipe())
    assert named["disk"] == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_of_the_user_are_refused_where_an_engine_maps_memory(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**cluster: object) -> list[str]:
        values = {f"cluster.{key}": value for key, value in cluster.items()}
        recipe = plans.recipe({**values, "cluster.address": "auto"})  # another machine's GPUs are not counted
        return [problem.where for problem in device_problems(recipe)]

    monkeypatch.setenv(variable, "max_split_size_mb:512,expandable_segments:True")
    assert refused(device="cuda", placement="colocated") == [variable]
    assert refused(device="cuda", placement="disaggregated", gpus_per_node=256) == [variable], "all on one node"
    assert refused(device="cuda", placement="disaggregated", gpus_per_node=1) == []
    assert refused(device="cpu", placement="colocated") == refused(device="auto", placement="colocated") == []
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")  # or it would be set for later tests
    with pytest.raises(RecipeError, match=f"{variable}(.|\n)*unset {variable}"):  # a node's own, which no driver sees
        RankActor.__ray_metadata__.modified_class().prepare("cuda", plans.recipe({"weights.transfer": "two_hops"}))
    monkeypatch.setenv(variable, "expandable_segments:False")
    assert refused(device="cuda", placement="colocated") == []
