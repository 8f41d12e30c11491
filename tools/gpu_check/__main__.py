"""Eleven checks for a first GPU, perhaps half an hour: figures, the range each should be in, and what to do if not.

    python -m tools.gpu_check                       # one GPU: all checks, a table, and gpu_check.json
    python -m tools.gpu_check --gpus 2              # two data ranks in the training checks
    python -m tools.gpu_check --only packing head   # some of them
    python -m tools.gpu_check --device cpu          # a tiny rehearsal: shows that the checks work, nothing about GPUs

Each check runs in processes of its own under torchrun, with a deadline, so that one that crashes or hangs does not take
the others with it. Ray and SGLang are needed by the last check alone, which is left out where they are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tools.gpu_check.figures import Figure

TITLES = {
    "environment": "the environment, and one layer of Transformer Engine",
    "attention": "packed sequences meet fused attention",
    "logprobs": "logprobs of each layer spec against transformers",
    "packing": "packed sequences against each one alone",
    "head": "the output layer's logprobs at full size",
    "updates": "five updates on policy",
    "offload": "memory given back and taken again",
    "checkpoints": "saved, loaded, continued",
    "experts": "models with experts, by both optimizers",
    "speed": "training speed by recompute",
    "rollouts": "two steps with SGLang",
}
SECONDS = {"rollouts": 2000.0}
"""Deadlines of checks; 600 s for the others."""
LOG_LINES = 80
"""Lines shown of a check that failed; torchrun says much after the error itself."""
PACKAGES = ("megagrpo", "torch", "megatron-core", "transformer-engine", "flash-attn", "apex", "sglang", "ray")
REPOSITORY = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus", type=int, default=1, help="ranks of the training checks")
    parser.add_argument("--only", nargs="+", choices=list(TITLES), default=list(TITLES), metavar="CHECK")
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"))
    given = parser.parse_args()
    machine = machine_facts()
    print("\n".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    if given.device == "cuda" and not machine["gpus"]:
        print("no GPU that torch sees: megagrpo doctor says more; --device cpu rehearses the checks")
        return 2
    results: dict[str, Any] = {}
    rows: list[str] = []
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as directory:
        for name in given.only:
            print(f"{name}: {TITLES[name]}", flush=True)
            began = time.monotonic()
            figures, error = run_check(name, given.device, given.gpus, Path(directory))
            for figure in figures:
                print("\n".join(figure.drawn()), flush=True)
            if error:
                print(f"  WRONG the check did not end: {error}", flush=True)
            rows += [figure.row(name) for figure in figures] or [f"{name:<12} no figure"]
            rows += [f"{name:<12} {'the check did not end':<92} WRONG"] if error else []
            seconds = time.monotonic() - began
            results[name] = {"seconds": seconds, "error": error, "figures": [figure.as_json() for figure in figures]}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    report = {"date": date, "device": given.device, "machine": machine, "checks": results}
    given.output.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(["", f"{'check':<12} {'figure':<73}   {'expected':<16} fits", *rows, ""]))
    wrong = [name for name, result in results.items() if result["error"] or not fits(result["figures"])]
    print(f"{len(results) - len(wrong)} of {len(results)} checks are as expected; written to {given.output}")
    if wrong:
        print(f"not: {', '.join(wrong)}")
    return 1 if wrong else 0


def fits(figures: Sequence[Mapping[str, Any]]) -> bool:
    return all(figure["fits"] for figure in figures)


def run_check(name: str, device: str, gpus: int, directory: Path) -> tuple[list[Figure], str]:
    """The figures that a check found before it ended, and why it did not end well: empty if it did."""
    from tools.gpu_check.run_one import ENVIRONMENT

    ranks = 1 if name in ("environment", "head", "speed", "rollouts") else gpus
    found, log = directory / f"{name}.jsonl", directory / f"{name}.log"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    if name == "rollouts":
        torchrun = []  # a server inherits torchrun's variables and would join its store
    # A check that counts bits or kernels must not meet the settings of the user's shell.
    hidden = {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"} if device == "cpu" else {}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *torchrun, "-m", "tools.gpu_check.run_one", name, device, str(directory), str(found)],
            cwd=REPOSITORY,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **ENVIRONMENT.get(name, {}), **hidden},
        )
        try:
            deadline = SECONDS.get(name, 600.0)
            code = process.wait(deadline)
            error = "" if code == 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            error = f"it ran for {deadline:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if error:
        error += "\n" + "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
    lines = found.read_text().splitlines() if found.exists() else []
    return [Figure(**json.loads(line)) for line in lines], error


def machine_facts() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm{gpu.major}{gpu.minor}" for gpu in gpus],
        "cuda": torch.version.cuda,
        "packages": dict(versions()),
    }


def versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            if find_spec(name.replace("-", "_")) is not None:
                yield name, "of unknown version"


if __name__ == "__main__":
    sys.exit(main())
