"""Plans for four models on 8 to 4,096 GPUs: the best layout that it finds, and what bounds it first.

    python benchmarks/scaling.py                 # the whole table of docs/scaling.md: minutes of one core
    python benchmarks/scaling.py --model 8B --gpus 8 16

Predictions, not measurements: `megagrpo plan` lists what they assume. The batch grows with the cluster, 16 responses
for each GPU, from 1,024 up to 16,384 responses: larger ones are not known to help.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.plan.parameters import known_models
from megagrpo.plan.plan import plan_of
from megagrpo.plan.search import Choice, search
from megagrpo.recipe.load import load
from megagrpo.recipe.schema import Recipe
from megagrpo.weights.families import read_architecture

RECIPE = Path(__file__).parents[1] / "yaml_recipes" / "grpo_70b.yaml"
SAMPLES = 16
RESPONSES_PER_GPU, RESPONSES_MIN, RESPONSES_MAX = 16, 1024, 16384
SAMPLE_BYTES_PER_TOKEN = 12
"""A sample on the driver has per token an int32 id, a float32 logprob and an int32 weight version."""


@dataclass(frozen=True)
class Size:
    """A model, the GPUs that it is planned for, and how many of them to look at."""

    model: str
    gpu: str
    gpus: tuple[int, ...]


SIZES = {
    "8B": Size("meta-llama/Llama-3.1-8B-Instruct", "H100", (8, 32, 128, 512, 2048, 4096)),
    "70B": Size("meta-llama/Llama-3.1-70B-Instruct", "H100", (16, 32, 128, 512, 2048, 4096)),
    "235B-A22B": Size("Qwen/Qwen3-235B-A22B", "H100", (128, 256, 512, 2048, 4096)),
    "671B": Size("deepseek-ai/DeepSeek-V3", "B300", (64, 128, 256, 512, 2048, 4096)),
}


@dataclass(frozen=True)
class Row:
    """The fastest choice for so many GPUs."""

    gpus: int
    responses: int
    choice: Choice
    recipe: Recipe
    """With the choice's layout."""

    def cells(self) -> Iterator[str]:
        time = self.choice.time
        seconds = {phase.phase: phase.seconds for phase in time.phases}
        yield f"{self.gpus:,}"
        yield _layout(self.recipe)
        yield f"{self.responses:,}"
        yield f"{time.seconds:.0f}"
        for phase in ("rollout", "logprobs", "update"):
            yield f"{seconds.get(phase, 0.0) / time.seconds:.0%}"
        yield f"{seconds.get('weight_sync', 0.0):.1f}"
        yield f"{seconds.get('reward', 0.0):.1f}"
        yield f"{seconds.get('driver', 0.0):.1f}"
        yield f"{time.tokens * SAMPLE_BYTES_PER_TOKEN / 1e6:.0f}"
        yield f"{time.tokens_per_second_per_gpu:,.0f}"
        yield self.bottleneck()

    def bottleneck(self) -> str:
        """The largest part of a step's time, which more of the same GPUs shorten least."""
        time = self.choice.time
        phase, part, seconds = max(
            ((phase.phase, name, seconds) for phase in time.phases for name, seconds in phase.parts.items()),
            key=lambda found: found[2],
        )
        return f"{phase}: {part}, {seconds / time.seconds:.0%}"


HEADS = (
    "GPUs", "layout", "responses", "step, s", "rollout", "logprobs", "update", "sync, s", "reward, s",
    "driver, s", "through the driver, MB", "tokens/s/GPU", "largest part",
)  # fmt: skip


def row(size: Size, gpus: int) -> Row | str:
    """Returns the reason, if nothing fits."""
    responses = max(RESPONSES_MIN, min(RESPONSES_MAX, gpus * RESPONSES_PER_GPU))
    overrides = [
        f"model.path={size.model}", f"cluster.gpu={size.gpu}", "algorithm.minibatches=1", "rollout.layout.tensor=8",
        f"rollout.prompts_per_step={responses // SAMPLES}", f"rollout.samples_per_prompt={SAMPLES}",
    ]  # fmt: skip
    recipe = load(RECIPE, overrides).recipe
    found = search(plan_of(recipe, read_architecture(known_models()[size.model])), gpus)
    if not found.choices:
        return f"nothing fits; nearest: {found.nearest.reason}" if found.nearest else "no layout is legal"
    best = found.choices[0]
    return Row(gpus, responses, best, load(RECIPE, [*overrides, *best.overrides]).recipe)


def _layout(recipe: Recipe) -> str:
    rollout = recipe.rollout
    engines = f"{rollout.engines} engines of {rollout.layout.tensor}, {recipe.cluster.placement}"
    experts = recipe.train.layout.expert_tensor is not None
    return f"{recipe.train.layout.parallel() if experts else _dense(recipe)}; {engines}"


def _dense(recipe: Recipe) -> ParallelLayout:
    return replace(recipe.train.layout.parallel(), expert_tensor=1)


def table(name: str, gpus: tuple[int, ...]) -> Iterator[str]:
    """Lines of a table in Markdown."""
    yield f"| {' | '.join(HEADS)} |"
    yield f"|{'---|' * len(HEADS)}"
    for count in gpus:
        found = row(SIZES[name], count)
        cells = [f"{count:,}", found] + [""] * (len(HEADS) - 2) if isinstance(found, str) else found.cells()
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, nargs="+", default=list(SIZES))
    parser.add_argument("--gpus", type=int, nargs="+")
    asked = parser.parse_args()
    for name in asked.model:
        size = SIZES[name]
        print(f"\n### {name}: {size.model} on {size.gpu}\n")
        for line in table(name, tuple(asked.gpus or size.gpus)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
