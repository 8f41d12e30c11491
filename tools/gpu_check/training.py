"""Checks of the training half, each a function from a Setting to Figures. They need torch and megatron-core, not Ray.

Every check runs in processes of its own, which torchrun starts (__main__.py); all ranks run it, and data ranks share
its batch. On a CPU the same code runs with a tiny model: that shows that the checks work, and nothing about GPUs.
"""

from __future__ import annotations

import gc
import json
import logging
import runpy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from megagrpo.batching.rank_batches import TrainSequence, make_rank_batches
from megagrpo.doctor import CHAPTERS
from megagrpo.megatron.heads import Head, HeadScale, VocabularyShard, vocabulary_logprobs
from megagrpo.megatron.model import named_tensors
from megagrpo.megatron.rank import TrainRank
from megagrpo.megatron.state import parameters_of
from megagrpo.rank_results import StepMetrics
from megagrpo.recipe.kernels import Attention, installed, layers_on
from megagrpo.recipe.schema import Recipe
from tools.gpu_check.figures import Figure

OF_ROLLOUTS = {"ray", "sglang", "SGLang"}
"""Parts of megagrpo doctor's findings that the check `rollouts` alone needs, and says itself that it misses."""
REPORT = "attach the JSON file to a report: this should not happen"
DENSE: dict[str, dict[str, Any]] = {
    "cuda": {  # Qwen2.5-0.5B
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "cpu": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 304, "tie_word_embeddings": True,
    },
}  # fmt: skip
NARROWEST = {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}
FUSED_EXPERTS = {"moe_permute_fusion": True}
"""Transformer Engine's kernel that recipes of such models ask for."""
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "Qwen3MoeConfig": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "num_experts": 32, "num_experts_per_tok": 2,
        "moe_intermediate_size": 128, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
    "DeepseekV3Config": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 512, "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 32, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 128, "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """The place of a check. `directory` is the same for all ranks; `device` is cpu or cuda."""

    device: str
    directory: Path
    rank: int = 0
    ranks: int = 1
    numbers: Iterator[int] = field(default_factory=count, repr=False)

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @cached_property
    def specs(self) -> tuple[str, ...]:
        """Returns the layer specs whose attention over packed sequences is fused here."""
        if not self.cuda:
            return ("local",)
        chosen = layers_on(torch.cuda.get_device_capability(), installed(), Attention(64, 64, half=True))
        return ("local",) if chosen.spec == "local" else ("local", "transformer_engine")

    @property
    def half(self) -> str:
        """Returns the dtype of training here."""
        return "bfloat16" if self.cuda else "float32"

    def model(self, kind: str = "Qwen2Config", sizes: dict[str, Any] | None = None) -> Path:
        """Returns the directory of a random float32 model, made once. Norms and biases are random too."""
        import transformers

        directory = self.directory / kind
        if self.rank == 0 and not (directory / "made").exists():
            config = getattr(transformers, kind)(max_position_embeddings=32768, **(sizes or DENSE[self.device]))
            torch.manual_seed(0)
            made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for name, parameter in made.named_parameters():
                if "norm" in name or name.endswith("bias"):
                    torch.nn.init.normal_(parameter, float("norm" in name), 0.1)
            made.save_pretrained(directory)
            (directory / "made").touch()
        while not (directory / "made").exists():  # torchrun ends this process if the first rank fails
            time.sleep(0.2)
        return directory

    @contextmanager
    def train_rank(self, model: Path, tokens_at_once: int, **train: Any) -> Iterator[TrainRank]:
        """Yields a training rank of this process; all ranks make theirs at the same time."""
        store = self.directory / f"store{next(self.numbers)}"
        device = f"cuda:{self.rank}" if self.cuda else "cpu"
        rank = TrainRank(self.recipe(tokens_at_once, **train), self.rank, f"file://{store}", str(model), device)
        try:
            yield rank
        finally:
            rank.close()
            del rank
            gc.collect()
            if self.cuda:
                torch.cuda.empty_cache()

    def recipe(
        self, tokens_at_once: int, *, dtype: str | None = None, loss: dict[str, Any] | None = None, **train: Any
    ) -> Recipe:
        return Recipe.model_validate(
            {
                "name": "gpu-check",
                "model": {"path": "unused", "dtype": dtype or self.half},
                "data": {"train": [{"path": "unused"}]},
                "rollout": {"prompts_per_step": 8, "samples_per_prompt": 2},
                "reward": {"functions": [{"function": "gsm8k"}]},
                "algorithm": {"kl": {"coefficient": 0.0}, **({"loss": loss} if loss else {})},
                "train": {
                    "total_steps": 1,
                    "tokens_per_microbatch": tokens_at_once,
                    "layout": {"data": self.ranks},
                    "optimizer": {"lr": 1e-5},
                    **train,
                },
            }
        )

    def sequences(self, lengths: Sequence[int], vocab: int) -> list[TrainSequence]:
        random = np.random.default_rng(0)
        return [
            TrainSequence(
                tokens=random.integers(0, vocab, length),
                loss_mask=np.arange(length) >= max(1, length // 8),
                rollout_logprobs=np.zeros(length, np.float32),
                row=row,
            )
            for row, length in enumerate(lengths)
        ]

    def dense(self) -> tuple[Path, list[TrainSequence]]:
        """Returns the dense model, and 16 sequences of a long tail, at most `longest` tokens."""
        random = np.random.default_rng(1)
        lengths = np.clip(random.lognormal(np.log(self.longest / 4), 0.8, 16).astype(int), 4, self.longest)
        return self.model(), self.sequences(lengths.tolist(), DENSE[self.device]["vocab_size"])

    @property
    def longest(self) -> int:
        return 2048 if self.cuda else 48


def load(rank: TrainRank, sequences: Sequence[TrainSequence]) -> None:
    size = rank.recipe.train.tokens_per_microbatch
    batches = make_rank_batches(sequences, layout=rank.layout, minibatches=1, tokens_per_microbatch=size, seed=0)
    rank.load_batch(batches[rank.where.data])


def logprobs_of(rank: TrainRank, sequences: Sequence[TrainSequence]) -> dict[tuple[int, int], float]:
    """Computes logprobs by row and index of each response token of this rank."""
    load(rank, sequences)
    rank.compute_old_logprobs()
    tokens = rank.token_numbers(rank.passes.old_logprobs or ())
    by_token = zip(tokens.rows, tokens.index, tokens.values, strict=True) if tokens else ()
    return {(int(row), int(index)): float(value) for row, index, value in by_token}


def step(rank: TrainRank, sequences: Sequence[TrainSequence], number: int) -> StepMetrics | None:
    load(rank, sequences)
    rank.compute_old_logprobs()
    advantages = np.random.default_rng(2).normal(size=len(sequences)).astype(np.float32)
    return rank.update(advantages, 1e-5, 0.0, number)


@torch.no_grad()
def transformers_logprobs(model: Path, sequences: Sequence[TrainSequence], device: str) -> dict[tuple[int, int], float]:
    """Computes them in float32, one sequence at a time."""
    import transformers

    whole: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
    found: dict[tuple[int, int], float] = {}
    for sequence in sequences:
        ids = torch.as_tensor(sequence.tokens, device=device)
        log_p = torch.log_softmax(whole(input_ids=ids[None]).logits[0, :-1].float(), -1)
        values = log_p.gather(1, ids[1:, None])[:, 0].tolist()
        trained = np.flatnonzero(sequence.loss_mask)
        found |= {(sequence.row, int(at - trained[0])): values[at - 1] for at in trained}
    return found


def apart(got: dict[tuple[int, int], float], wanted: dict[tuple[int, int], float]) -> np.ndarray:
    """Returns the absolute differences in nats of the tokens in `got`."""
    return np.abs([got[token] - wanted[token] for token in got])


def bits(rank: TrainRank) -> int:
    """Returns a sum of this rank's weights as integers: equal weights have equal sums."""
    total = 0
    for tensor in named_tensors(rank.policy.chunks).values():
        flat = tensor.detach().contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32).flatten()
        places = torch.arange(1, flat.numel() + 1, device=flat.device)
        total += int((flat.to(torch.int64) * places).sum().item())
    return total


# --- the checks, in order ---------------------------------------------------------------------------------------------


def environment(setting: Setting) -> Iterator[Figure]:
    """`megagrpo doctor`, and one layer of Transformer Engine."""
    wrong = [found for look in CHAPTERS.values() for found in look() if found.state == "wrong"]
    wrong = [found for found in wrong if found.part not in OF_ROLLOUTS]
    note = "; ".join(f"{found.part}: {found.found}" for found in wrong)
    yield Figure("parts that megagrpo doctor calls wrong", len(wrong), high=0, fix="megagrpo doctor", note=note)
    if "transformer_engine" not in setting.specs:
        note = "the local layers run instead (docs/gpu.md)" if setting.cuda else "needs a GPU"
        yield Figure("Transformer Engine", 0, note=note)
        return
    import transformer_engine.pytorch as te

    layer = te.LayerNormLinear(1024, 1024, normalization="RMSNorm", bias=False, params_dtype=torch.bfloat16)
    given = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)
    layer(given).sum().backward()
    weight, norm = layer.weight.detach().float(), layer.layer_norm_weight.detach().float()
    wanted = torch.nn.functional.rms_norm(given.float(), (1024,), norm, layer.eps) @ weight.t()
    error = (layer(given).float() - wanted).abs().max().item() / wanted.abs().max().item()
    fix = "install the Transformer Engine that setup.py's extra `te` names, built for this CUDA and torch"
    yield Figure("largest error of a Transformer Engine layer, relative", error, high=0.02, fix=fix)


def attention(setting: Setting) -> Iterator[Figure]:
    """Yields whether packed sequences meet a fused attention kernel. Needs NVTE_DEBUG=1, NVTE_DEBUG_LEVEL=1."""
    if not setting.cuda:
        yield Figure("attention kernels", 0, note="needs a GPU")
        return
    model, sequences = setting.dense()
    said = _Said()
    logging.getLogger().addHandler(said)
    for spec in setting.specs:
        with setting.train_rank(model, 8192, layer_spec=spec) as rank:
            load(rank, sequences)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                rank.compute_old_logprobs()
            names = {event.key for event in profile.key_averages()}
        fused = sorted(name for name in names if any(part in name.lower() for part in ("flash", "fmha", "sdpa_sm")))
        note = "; ".join([*(name[:70] for name in fused[:2]), *sorted(said.lines)])
        fix = "train.layer_spec: local, or the packages that docs/gpu.md names for this card"
        yield Figure(f"{spec}: fused attention kernels in a packed forward pass", len(fused), low=1, fix=fix, note=note)
        said.lines.clear()


class _Said(logging.Handler):
    """Keeps what Transformer Engine says about its choice of attention."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if "Running with" in (text := record.getMessage()):
            self.lines.add(text.strip()[:100])


def logprobs(setting: Setting) -> Iterator[Figure]:
    """Logprobs of each layer spec against transformers in float32."""
    model, sequences = setting.dense()
    wanted = transformers_logprobs(model, sequences, setting.device)
    fix = "compare with train.layer_spec: local; if both differ, attach the JSON file to a report"
    cases = [("local", "float32", 1e-3)]
    cases += [(spec, "bfloat16", 0.03) for spec in setting.specs if setting.cuda]
    for spec, dtype, limit in cases:
        with setting.train_rank(model, 4 * setting.longest, layer_spec=spec, dtype=dtype) as rank:
            off = apart(logprobs_of(rank, sequences), wanted)
        name = f"{spec}, {dtype}: difference to transformers in float32"
        yield Figure(f"{name}, mean", float(off.mean()), "nats", high=limit, fix=fix)
        yield Figure(f"{name}, largest", float(off.max()), "nats", high=20 * limit, fix=fix)


def packing(setting: Setting) -> Iterator[Figure]:
    """Sequences in one microbatch against each in one of its own: logprobs and gradients."""
    model, vocab = setting.model(), DENSE[setting.device]["vocab_size"]
    random = np.random.default_rng(3)
    lengths = random.integers(int(0.55 * setting.longest), setting.longest, 8).tolist()
    sequences = setting.sequences(lengths, vocab)
    advantages = random.normal(size=len(sequences)).astype(np.float32)
    for spec in setting.specs:
        seen = []
        for tokens_at_once in (8 * setting.longest, setting.longest):
            with setting.train_rank(model, tokens_at_once, layer_spec=spec) as rank:
                found = logprobs_of(rank, sequences)
                update = rank.begin_update(advantages, 0.0, 1)
                ((minibatch, weights),) = update.minibatches
                rank.compute_gradients(minibatch, weights, update)
                parameters = parameters_of(rank.policy.chunks).items()
                gradients = {name: parameter.main_grad.cpu().float() for name, parameter in parameters}
            seen.append((found, gradients))
        (packed, packed_gradients), (alone, gradients) = seen
        error = max(
            ((packed_gradients[name] - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()
            for name, wanted in gradients.items()
        )
        # Roundings to bfloat16 differ with the shapes of the products.
        limits = (0.02, 0.05) if setting.cuda else (1e-4, 1e-3)
        fix = f"train.layer_spec: the other one; {REPORT}"
        off = float(apart(packed, alone).mean())
        yield Figure(f"{spec}: logprobs, packed and alone, mean difference", off, "nats", high=limits[0], fix=fix)
        yield Figure(f"{spec}: gradients, packed and alone, largest difference", error, high=limits[1], fix=fix)


def head(setting: Setting) -> Iterator[Figure]:
    """The output layer's logprobs: values and gradients against float64, seconds and memory at full size."""
    hidden_size, vocab, tokens, few = (896, 151936, 16384, 256) if setting.cuda else (16, 500, 64, 16)
    device = torch.device(setting.device)
    random = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, setting.half)
    hidden = torch.randn(tokens, hidden_size, generator=random, device=device).to(dtype)
    weight = (torch.randn(vocab, hidden_size, generator=random, device=device) / hidden_size**0.5).to(dtype)
    labels = torch.randint(0, vocab, (tokens,), generator=random, device=device)
    shard = VocabularyShard(vocab, 0, None)

    def run(of: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        inputs, matrix = hidden[:of].clone().requires_grad_(), weight.clone().requires_grad_()
        positions = torch.arange(of, device=device)
        head = Head(matrix, shard, HeadScale())
        found, _ = vocabulary_logprobs(inputs, positions, labels[:of], head, entropy=False)
        gradients = torch.autograd.grad(found.sum(), (inputs, matrix))
        return found.detach(), gradients[0], gradients[1]

    exact = hidden[:few].double().requires_grad_(), weight.double().requires_grad_()
    log_p = torch.log_softmax(exact[0] @ exact[1].t(), -1).gather(1, labels[:few, None])[:, 0]
    wanted = torch.autograd.grad(log_p.sum(), exact)
    got = run(few)
    limit = 1e-2 if setting.cuda else 1e-5
    off = (got[0].double() - log_p.detach()).abs().max().item()
    yield Figure("largest error of a logprob against float64", off, "nats", high=limit, fix=REPORT)
    for name, mine, its in (("hidden states", got[1], wanted[0]), ("output matrix", got[2], wanted[1])):
        error = ((mine.double() - its).norm() / its.norm()).item()
        yield Figure(f"error of the gradient of the {name}, relative", error, high=limit, fix=REPORT)
    del exact, wanted, got
    run(tokens)  # compiles what is compiled
    if setting.cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before, began = torch.cuda.memory_allocated() if setting.cuda else 0, time.perf_counter()
    run(tokens)
    if setting.cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    yield Figure(f"forward and backward, {tokens:,} tokens x {vocab:,} words", seconds * 1e3, "ms")
    if setting.cuda:
        held = (torch.cuda.max_memory_allocated() - before) / 2**30
        yield Figure("memory for it, besides inputs", held, "GiB", high=2.0, fix=REPORT)


def updates(setting: Setting) -> Iterator[Figure]:
    """Five updates on policy: the first ratio is 1, nothing is clipped, gradients are finite, and it learns. By GSPO,
    whose bounds are the narrowest that recipes have: rounding alone must not reach them."""
    model, sequences = setting.dense()
    advantages = np.ones(len(sequences), np.float32)
    means, ratios, clipped, norms = [], [], [], []
    with setting.train_rank(model, 4 * setting.longest, loss=NARROWEST) as rank:
        for number in range(1, 6):
            means.append(float(np.mean(list(logprobs_of(rank, sequences).values()))))
            metrics = rank.update(advantages, 1e-5 if setting.cuda else 1e-3, 0.0, number)
            if metrics is not None and metrics.ratio_mean is not None:
                ratios.append(abs(metrics.ratio_mean - 1))
                clipped.append(metrics.clip_low_fraction + metrics.clip_high_fraction)
                norms.append(metrics.grad_norm)
    if not ratios:
        return
    fix = "the forward pass of an update differs from the one before it: train.layer_spec: local shows whose it is"
    yield Figure("ratio of new to old probability, distance to 1", max(ratios), high=1e-4, fix=fix)
    yield Figure("share that bounds of 3e-4 clip in the first minibatch", max(clipped), high=0.0, fix=fix)
    yield Figure("largest gradient norm", max(norms), low=0.0, fix="a norm that is not a number: " + REPORT)
    gain = means[-1] - means[0]
    yield Figure("mean logprob gained by rewarding every token", gain, "nats", low=1e-4, fix=REPORT)


def offload(setting: Setting) -> Iterator[Figure]:
    """Three times out and back: device memory is free meanwhile, host memory does not grow, the next step is equal."""
    model, sequences = setting.dense()
    with setting.train_rank(model, 4 * setting.longest) as rank:
        for number in (1, 2):
            step(rank, sequences, number)
        wanted = bits(rank)
    del rank  # the name keeps the first rank's memory, which would count as held by the second
    gc.collect()
    process, resident, freed = psutil.Process(), [], 0.0
    with setting.train_rank(model, 4 * setting.longest) as rank:
        step(rank, sequences, 1)
        held = torch.cuda.memory_allocated() if setting.cuda else 1
        for _ in range(3):
            rank.release(["parameters", "gradients", "optimizer"])
            freed = 1 - torch.cuda.memory_allocated() / held if setting.cuda else 1.0
            resident.append(process.memory_info().rss)
            rank.restore(["parameters", "gradients", "optimizer"])
        step(rank, sequences, 2)
        equal = bits(rank) == wanted
    yield Figure("share of device memory that is free while it is out", freed, low=0.9, fix=REPORT)
    growth = (resident[-1] - resident[0]) / max(resident[0], 1)
    yield Figure("growth of host memory from the first time to the third", growth, high=0.05, fix=REPORT)
    fix = "a kernel that is not deterministic also does it: repeat; then train.layer_spec: local"
    yield Figure("next step equal to the last bit (1: yes)", float(equal), low=1, fix=fix)


def checkpoints(setting: Setting) -> Iterator[Figure]:
    """Saved, loaded into a new rank, and the next step equal."""
    model, sequences = setting.dense()
    saved = setting.directory / "checkpoint"
    saved.mkdir(exist_ok=True)
    with setting.train_rank(model, 4 * setting.longest) as rank:
        step(rank, sequences, 1)
        began = time.perf_counter()
        rank.take_snapshot()
        waited = time.perf_counter() - began
        files, contents = rank.write_snapshot(saved)
        files += rank.finish_snapshot(saved, contents)
        seconds = time.perf_counter() - began
        step(rank, sequences, 2)
        wanted = bits(rank)
    with setting.train_rank(model, 4 * setting.longest) as rank:
        rank.load(saved)
        step(rank, sequences, 2)
        equal = bits(rank) == wanted
    size = sum(file.stat().st_size for file in saved.iterdir()) / 2**30
    yield Figure(f"saving {size:.2f} GiB in {len(files)} files", seconds, "s")
    yield Figure("of it, until training goes on, with the first plan and pinned memory", waited, "s")
    fix = "a kernel that is not deterministic also does it: repeat; then train.layer_spec: local"
    yield Figure("next step after loading equal to the last bit (1: yes)", float(equal), low=1, fix=fix)


def experts(setting: Setting) -> Iterator[Figure]:
    """Models with experts, most of which get no token: logprobs, and two updates by both optimizers. Transformer
    Engine's layers with its kernel that sorts tokens by experts."""
    for kind, sizes in WITH_EXPERTS.items():
        model = setting.model(kind, sizes)
        short = setting.sequences([3, 5, 4, 6], sizes["vocab_size"])
        wanted = transformers_logprobs(model, short, setting.device)
        for spec in setting.specs:
            norms, options = [], FUSED_EXPERTS if spec == "transformer_engine" else {}
            for distributed in (True, False):
                train = {"layer_spec": spec, "distributed_optimizer": distributed, "megatron": options}
                with setting.train_rank(model, 64, **train) as rank:
                    off = apart(logprobs_of(rank, short), wanted)
                    metrics = [step(rank, short, number) for number in (1, 2)]
                norms.append([found.grad_norm for found in metrics if found is not None])
            name = f"{json.loads((model / 'config.json').read_text())['model_type']}, {spec}"
            limit = 0.05 if setting.cuda else 1e-4
            yield Figure(f"{name}: difference to transformers, mean", float(off.mean()), "nats", high=limit, fix=REPORT)
            if norms[0]:
                ratio = max(abs(a / b - 1) for a, b in zip(*norms, strict=True))
                about = f"{name}: gradient norms of the two optimizers, difference"
                yield Figure(about, ratio, high=0.02 if setting.cuda else 1e-4, fix=REPORT)


def speed(setting: Setting) -> Iterator[Figure]:
    """Yields what benchmarks/training.py measures, of the dense model, for each way to recompute."""
    benchmark = runpy.run_path(str(Path(__file__).resolve().parents[2] / "benchmarks" / "training.py"))
    model, sizes = setting.model(), DENSE[setting.device]
    peak = benchmark["peak_flops"](torch.cuda.get_device_name()) if setting.cuda else None
    capacity = 16384 if setting.cuda else 256
    for name, recompute in benchmark["recompute_ways"](sizes["num_hidden_layers"]).items():
        recipe = benchmark["make_recipe"](setting.half, capacity, recompute)
        store = f"file://{setting.directory}/store{next(setting.numbers)}"
        found = benchmark["measure"](setting.device, model, sizes, recipe, store, 3)
        gc.collect()
        if setting.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if found is None:
            yield Figure(f"recompute {name}: out of memory", 0)
            continue
        held = f"{found.held_bytes / 2**30:.1f} GiB at most"
        tokens = found.tokens / found.seconds
        yield Figure(f"recompute {name}: {capacity:,} tokens at once", tokens, "tok/s", note=held)
        if peak:
            fix = "docs/performance.md; if the check `attention` was wrong, that is why"
            share = found.operations / found.seconds / peak
            yield Figure(f"recompute {name}: model FLOPs utilisation", share, low=0.1, high=1.0, fix=fix)
