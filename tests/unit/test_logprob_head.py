"""Bytes that the logprob head moves for each logit, op by op and fused. Its products are float32 of bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megagrpo.megatron import heads
from megagrpo.megatron.heads import Head, HeadScale, VocabularyShard, vocabulary_logprobs
from tests.fused_kernels import moved_and_errors

TOKENS, HIDDEN, VOCAB = 64, 4, 2048


class Moved(TorchDispatchMode):
    """Bytes of tensors as large as the logits that operations read and write; views move nothing, and gather and
    scatter next to nothing."""

    bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view and not any(word in str(function) for word in ("empty", "gather", "scatter")):
            tensors = (each for each in (*args, result) if torch.is_tensor(each))
            self.bytes += sum(each.numel() * each.element_size() for each in tensors if each.numel() == TOKENS * VOCAB)
        return result


def moved(entropy: str) -> tuple[float, float]:
    """Bytes for each logit forward and backward."""
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    positions, shard = torch.arange(TOKENS), VocabularyShard(VOCAB, 0, None)
    with Moved() as forward:
        logprobs, entropies = vocabulary_logprobs(
            hidden, positions, positions, Head(weight, shard, HeadScale()), entropy=entropy != "none"
        )
        loss = logprobs.sum() + (entropies.sum() if entropy == "gradient" else 0.0)
    with Moved() as backward:
        loss.backward()
    return forward.bytes / TOKENS / VOCAB, backward.bytes / TOKENS / VOCAB


def test_an_entropy_costs_bytes_only_where_it_is_asked_for() -> None:
    assert [moved(kind) for kind in ("none", "value", "gradient")] == [(28, 46), (44, 46), (44, 74)]


FUSED = """
import itertools, json, torch
from torch._inductor import ir, metrics
from megagrpo.megatron.heads import _gradient, exponential_sums
torch._logging.set_logs(inductor_metrics=True)
ir.is_cpu = lambda _: False  # on CPUs alone a tanh that is used twice is written and read
rows, columns = 64, 4096
logits, top = torch.randn(rows, columns), torch.full((rows,), -1e30)
of_logprob, of_entropy, normalizer = torch.randn(3, rows)
column = torch.randint(0, columns, (rows, 1))
grads = normalizer + 10, normalizer.abs(), of_logprob, of_entropy, of_logprob[:, None], column
moved, errors = [], []
for cap, function in itertools.product((None, 2.0), (exponential_sums, _gradient)):
    more = (top, None, 0.7, cap, True) if function is exponential_sums else (None, *grads, 0.7, cap, torch.bfloat16)
    metrics.reset()
    before = logits.clone()
    fused = torch.compile(function, dynamic=True)(logits, *more)
    assert torch.equal(before, logits)
    plain = function(logits.clone(), *more)
    pairs = zip(fused, plain) if isinstance(plain, tuple) else [(fused, plain)]
    errors += [((a - b).abs().max() / b.abs().max()).item() for a, b in pairs]
    moved.append(metrics.num_bytes_accessed / rows / columns)
print(json.dumps([moved, errors]))
"""


@pytest.mark.long
def test_fused_the_head_reads_and_writes_each_logit_once_between_products() -> None:
    """Compiled for CPUs by the compiler that fuses for GPUs, which counts the bytes of its kernels."""
    moved, errors = moved_and_errors(FUSED)
    # Logits; logits and bfloat16 gradients. A cap moves no more.
    assert moved == pytest.approx([4, 6] * 2, rel=0.05)
    assert max(errors) < 1e-2  # of bfloat16


def test_logits_of_bfloat16_are_not_rounded_to_it() -> None:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 64, generator=random).bfloat16()
    weight = (torch.randn(300, 64, generator=random) / 4).bfloat16()
    labels = torch.arange(50)
    head = Head(weight, VocabularyShard(300, 0, None), HeadScale())
    logprobs, _ = vocabulary_logprobs(hidden, labels, labels, head, entropy=False)
    exact = torch.log_softmax(hidden.double() @ weight.double().t(), -1)[labels, labels]
    rounded = torch.log_softmax((hidden @ weight.t()).float(), -1)[labels, labels]
    assert (logprobs - exact).abs().max() < 3e-6
    assert (rounded - exact).abs().max() > 3e-3  # what rounding would do
    assert heads.CHUNK_COLUMNS["cuda"] == 8192
