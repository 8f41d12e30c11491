"""CPU seconds of `megagrpo plan --search`: candidates by the thousand, milliseconds each. No GPU and no weights.

    python benchmarks/plan_search.py     # ten seconds

What makes each candidate's estimate dearer, such as weights in blocks, shows in the last column.
"""

from __future__ import annotations

import time
from pathlib import Path

from megagrpo.plan.parameters import known_models
from megagrpo.plan.plan import plan_of
from megagrpo.plan.search import search
from megagrpo.recipe.load import load
from megagrpo.weights.families import read_architecture

RECIPES = Path(__file__).parent.parent / "yaml_recipes"
DEEPSEEK, QWEN = "deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-235B-A22B"
SEARCHES = (
    ("grpo_70b.yaml", "meta-llama/Llama-3.1-70B-Instruct", 128),
    ("math_qwen3_30b_a3b_2x8.yaml", QWEN, 512),
    ("deepseek_v3_671b.yaml", DEEPSEEK, 512),
    ("deepseek_v3_671b.yaml", DEEPSEEK, 2048),
)


def main() -> None:
    print("| model | GPUs | engines | legal layouts | candidates | CPU s | ms of a candidate |\n|" + " --- |" * 7)
    for file, model, gpus in SEARCHES:
        for quantization in ("null", "fp8"):
            recipe = load(RECIPES / file, [f"model.path={model}", f"rollout.quantization={quantization}"]).recipe
            planned = plan_of(recipe, read_architecture(known_models()[model]))
            began = time.process_time()
            found = search(planned, gpus)
            seconds = time.process_time() - began
            engines = "fp8" if quantization == "fp8" else "bfloat16"
            cells = [model, f"{gpus:,}", engines, f"{found.legal:,}", f"{found.estimated:,}", f"{seconds:.2f}"]
            print(f"| {' | '.join(cells)} | {1000 * seconds / max(1, found.estimated):.2f} |", flush=True)


if __name__ == "__main__":
    main()
