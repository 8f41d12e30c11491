"""The time to plan weight syncs, and the plans' predictions for real models and clusters. No GPU and no weights.

    python benchmarks/weight_plan.py            # both tables: minutes of one core
    python benchmarks/weight_plan.py --models   # or --ranks: one of them

Predicted seconds are arithmetic over the bytes of each kind of link (weight_traffic.py) at the speeds printed above
the table; they are predictions, not measurements. Published seconds were measured by others, on their own clusters, end
to end. Kimi-K2 stands here with its experts, sizes and 60 of its 61 layers, and with grouped queries in place of latent
attention, which is a small part of its bytes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from weight_traffic import GatherEverything, LinkBytes, LinkSpeeds, Traffic, gather_everything, topology_of, traffic_of

from megagrpo.layout.parallel import ParallelLayout, rank_grid
from megagrpo.plan.parameters import known_models
from megagrpo.recipe.schema import EngineLayoutConfig
from megagrpo.weights.blocks import Preparation, prepare
from megagrpo.weights.boxes import Link
from megagrpo.weights.families import architecture_of, read_architecture, tensors_of
from megagrpo.weights.families.architecture import Architecture
from megagrpo.weights.plan import make_plan
from megagrpo.weights.sides import sglang
from megagrpo.weights.sides.megatron_rank import TE_SPEC

DEVICES_PER_NODE = 8
SPEEDS = LinkSpeeds()
BUCKET_BYTES = 256 << 20


def model(family: str, layers: int, hidden: int, heads: int, groups: int, vocab: int, **more: int) -> Architecture:
    config = {
        "model_type": family, "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": groups, "head_dim": 128, "vocab_size": vocab, "max_position_embeddings": 4096,
        "intermediate_size": 1,
    }  # fmt: skip
    return architecture_of(config | more)


def mixture(layers: int, hidden: int, heads: int, groups: int, vocab: int, experts: int, ffn: int) -> Architecture:
    return model(
        "qwen3_moe", layers, hidden, heads, groups, vocab,
        num_experts=experts, num_experts_per_tok=8, moe_intermediate_size=ffn,
    )  # fmt: skip


LLAMA_8B = model("llama", 32, 4096, 32, 8, 128256, intermediate_size=14336)
LLAMA_70B = model("llama", 80, 8192, 64, 8, 128256, intermediate_size=28672)
QWEN_30B = mixture(48, 2048, 32, 4, 151936, experts=128, ffn=768)
QWEN_235B = mixture(94, 4096, 64, 4, 151936, experts=128, ffn=1536)
DEEPSEEK = read_architecture(known_models()["deepseek-ai/DeepSeek-V3"])
KIMI = mixture(60, 7168, 64, 8, 163840, experts=384, ffn=2048)


@dataclass(frozen=True)
class Case:
    """A model, how it is trained, and its engines: on the training ranks' devices, or on nodes of their own; as with
    rollout.quantization, if given."""

    name: str
    arch: Architecture
    layout: ParallelLayout
    engine: EngineLayoutConfig
    engines: int
    colocated: bool
    published: str = ""
    quantization: str | None = None


# As in yaml_recipes/deepseek_v3_671b.yaml, with more replicas.
DEEPSEEK_LAYOUT = ParallelLayout(tensor=8, pipeline=16, last_stage_layers=1, data=4, expert=32)
CASES = (
    Case("Llama-3.1-8B", LLAMA_8B, ParallelLayout(tensor=2, data=4), EngineLayoutConfig(tensor=1), 8, True),
    Case("Llama-3.1-8B", LLAMA_8B, ParallelLayout(tensor=2, data=4), EngineLayoutConfig(tensor=1), 8, False),
    Case(
        "Qwen3-30B-A3B", QWEN_30B, ParallelLayout(tensor=4, data=4, expert=8), EngineLayoutConfig(tensor=8, expert=8),
        2,
        True, "0.74-1.0",
    ),
    Case(
        "Qwen3-30B-A3B", QWEN_30B, ParallelLayout(tensor=4, data=4, expert=8), EngineLayoutConfig(tensor=8, expert=8),
        2,
        False, "0.74-1.0",
    ),
    Case("Llama-3-70B", LLAMA_70B, ParallelLayout(tensor=8, pipeline=4, data=2), EngineLayoutConfig(tensor=8), 8, True),
    Case(
        "Llama-3-70B", LLAMA_70B, ParallelLayout(tensor=8, pipeline=2, data=8), EngineLayoutConfig(tensor=8), 16, True
    ),
    Case(
        "Llama-3-70B in fp8", LLAMA_70B, ParallelLayout(tensor=8, pipeline=2, data=8), EngineLayoutConfig(tensor=8), 16,
        True, quantization="fp8",
    ),
    Case(
        "Llama-3-70B", LLAMA_70B, ParallelLayout(tensor=8, pipeline=4, data=2), EngineLayoutConfig(tensor=8), 8, False
    ),
    Case(
        "Qwen3-235B-A22B", QWEN_235B, ParallelLayout(tensor=4, pipeline=2, data=16, expert=32),
        EngineLayoutConfig(tensor=8, expert=8), 16, True, "3.2-10.8",
    ),
    Case(
        "Qwen3-235B-A22B", QWEN_235B, ParallelLayout(tensor=4, pipeline=2, data=16, expert=32),
        EngineLayoutConfig(tensor=8, expert=8), 8, False, "3.2-10.8",
    ),
    Case(
        "DeepSeek-V3 671B", DEEPSEEK, DEEPSEEK_LAYOUT, EngineLayoutConfig(tensor=32, expert=32, attention_data=4), 16,
        True,
    ),
    Case(
        "DeepSeek-V3 671B", DEEPSEEK, DEEPSEEK_LAYOUT, EngineLayoutConfig(tensor=32, expert=32, attention_data=4), 8,
        False,
    ),
    Case(  # over 32 tensor ranks SGLang would cut MLPs within a block
        "DeepSeek-V3 671B in fp8", DEEPSEEK, DEEPSEEK_LAYOUT,
        EngineLayoutConfig(tensor=16, expert=16, attention_data=2, pipeline=2), 16, True, quantization="fp8",
    ),
    Case(
        "Kimi-K2 1T", KIMI, ParallelLayout(tensor=8, pipeline=4, data=32, expert=64),
        EngineLayoutConfig(tensor=32, expert=32), 32, True, "1.3-7.2",
    ),
    Case(
        "Kimi-K2 1T", KIMI, ParallelLayout(tensor=8, pipeline=4, data=32, expert=64),
        EngineLayoutConfig(tensor=32, expert=32), 16, False, "1.3-7.2",
    ),
)  # fmt: skip


def of_ranks(name: str, arch: Architecture, ranks: int) -> Case:
    """The same model on more and more ranks: replicas are added, of training and of engines."""
    engine = EngineLayoutConfig(tensor=32, expert=32) if arch.experts else EngineLayoutConfig(tensor=8)
    expert = min(64, ranks // 4) if arch.experts else 1
    layout = ParallelLayout(
        tensor=8, pipeline=4, data=ranks // 32, expert=expert, last_stage_layers=None if expert == 1 else 13
    )
    return Case(name, arch, layout, engine, ranks // engine.tensor, colocated=True)


RANKS = (64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class Figures:
    """`describing` and `planning` are seconds of one core; `peak_bytes` is all of the process with its manifests."""

    describing: float
    planning: float
    peak_bytes: int
    model_bytes: int
    traffic: Traffic
    fetching: float
    gathered: GatherEverything


def fetching_seconds(preparation: Preparation | None) -> float:
    """The bytes that training ranks fetch of one another before they quantise: all of it before anything is sent."""
    if preparation is None or preparation.fetches is None:
        return 0.0
    return traffic_of(preparation.fetches, SPEEDS, BUCKET_BYTES).seconds


def figures(case: Case) -> Figures:
    began = time.process_time()
    sources = [TE_SPEC.manifest(case.arch, case.layout, where, "bfloat16") for where in rank_grid(case.layout)]
    of_engine = [
        sglang.manifest(case.arch, case.engine, rank, "bfloat16", "cuda", 0, case.quantization)
        for rank in range(case.engine.ranks)
    ]
    destinations = [
        replace(manifest, holder=f"engine {engine} rank {rank}")
        for engine in range(case.engines)
        for rank, manifest in enumerate(of_engine)
    ]
    first = 0 if case.colocated else len(sources)
    topology = topology_of(range(len(sources)), range(first, first + len(destinations)), DEVICES_PER_NODE)
    described = time.process_time()
    sources, preparation = prepare(sources, destinations, topology.sources)
    plan = make_plan(sources, destinations, topology)
    planned = time.process_time()
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Figures(
        described - began,
        planned - described,
        peak_bytes,
        2 * sum(prod(tensor.shape) for tensor in tensors_of(case.arch)),
        traffic_of(plan, SPEEDS, BUCKET_BYTES),
        fetching_seconds(preparation),
        gather_everything(plan, SPEEDS),
    )


def in_own_process(cases: Iterable[Case]) -> Iterator[tuple[Case, Figures]]:
    """One fresh process for each, so that peak memory is its own."""
    for case in cases:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            yield case, pool.apply(figures, (case,))


def print_rows(rows: Iterable[tuple[str, ...]]) -> None:
    """Prints a Markdown table, each row as soon as it is there."""
    for number, row in enumerate(rows):
        print("| " + " | ".join(row) + " |", flush=True)
        if number == 0:
            print("|" + " --- |" * len(row))


def model_rows() -> Iterator[tuple[str, ...]]:
    yield (
        "model", "training ranks", "engines", "planning s", "peak MB", "network", "within a node", "within a GPU",
        "over network GB", "buckets", "bound s", "predicted s", "over bound", "gather all s", "gather all GB",
        "published s",
    )  # fmt: skip
    for case, found in in_own_process(CASES):
        traffic, engine = found.traffic, case.engine
        sizes = {name: getattr(engine, name) for name in ("expert", "attention_data", "pipeline")}
        shape = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        predicted, bound = traffic.seconds + found.fetching, traffic.least_seconds
        yield (
            f"{case.name}, {found.model_bytes / 1e9:.0f} GB",
            f"{case.layout.ranks}: {case.layout}",
            f"{case.engines} x {engine.tensor}{f' ({shape})' if shape else ''}, "
            + ("the same GPUs" if case.colocated else "own nodes"),
            f"{found.planning:.1f}",
            f"{found.peak_bytes / 1e6:.0f}",
            *(link_text(traffic.links[link], SPEEDS.of(link)) for link in LINKS),
            f"{traffic.links['network'].total / 1e9:.0f}",
            f"{traffic.buckets}",
            f"{bound:.3f}",
            f"{predicted:.3f}",
            f"{predicted / bound:.2f}",
            f"{found.gathered.seconds:.2f}",
            f"{found.gathered.network_bytes / 1e9:.0f}",
            case.published or "-",
        )


LINKS: tuple[Link, ...] = ("network", "node", "device")


def link_text(link: LinkBytes, speed: float) -> str:
    """GB and seconds of the busiest device, and how many times as much as the least."""
    if not link.busiest:
        return "-"
    return f"{link.busiest / 1e9:.2f} GB, {link.busiest / speed:.3f} s, {link.busiest / link.least:.2f} x"


def rank_rows() -> Iterator[tuple[str, ...]]:
    yield "model", "ranks", "describing s", "planning s", "peak MB", "buckets"
    cases = [of_ranks("Llama-3-70B", LLAMA_70B, ranks) for ranks in RANKS[:4]]
    cases += [of_ranks("DeepSeek-V3 671B", DEEPSEEK, ranks) for ranks in RANKS]
    for case, found in in_own_process(cases):
        yield (
            case.name,
            f"{case.layout.ranks} + {case.engines * case.engine.tensor}",
            f"{found.describing:.1f}",
            f"{found.planning:.1f}",
            f"{found.peak_bytes / 1e6:.0f}",
            f"{found.traffic.buckets}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", action="store_true", help="only the predicted figures of models")
    parser.add_argument("--ranks", action="store_true", help="only time and memory against the number of ranks")
    chosen = parser.parse_args()
    if not chosen.ranks:
        print(
            f"Nodes of {DEVICES_PER_NODE} GPUs. GB/s of a GPU and direction: network {SPEEDS.network / 1e9:.0f}, "
            f"NVLink {SPEEDS.node / 1e9:.0f}, copies {SPEEDS.device / 1e9:.0f}. bfloat16, buckets of "
            f"{BUCKET_BYTES >> 20} MiB.\n"
            "Links: bytes and seconds of the busiest GPU, and times the least, with equal parts. Planning: seconds "
            "of one core, measured. Bytes: counted. Bound, predicted and gather all: predictions.\n"
        )
        print_rows(model_rows())
    if not chosen.models:
        print("\nPlanning by ranks, training + engine ranks on the same GPUs; seconds of one core, measured:\n")
        print_rows(rank_rows())


if __name__ == "__main__":
    main()
